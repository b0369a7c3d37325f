"""What the plugin claims, and what it refuses with the way out."""

from __future__ import annotations

import pytest
from torch import nn

from mixle_core import (
    AxisClaim,
    CapabilityError,
    MixleError,
    ModelLayout,
    ModuleLayout,
    OwnershipError,
    ParallelPlan,
    Refusal,
    Replica,
    attach,
    explain,
    hookimpl,
    load_plugins,
)
from mixle_core.testing import ToyLayout, toy_model


def refused(plan):
    with pytest.raises(MixleError) as caught:
        explain(toy_model(), plan)
    return caught.value


def test_every_trainable_parameter_of_a_replicated_plan_is_claimed():
    model = toy_model()
    model.norm.weight.requires_grad_(False)
    table = explain(model, ParallelPlan(dp_replicate=4))
    names = {name for name, _ in model.named_parameters()} - {"norm.weight"}
    assert {row.name for row in table.rows} == names
    for row in table.rows:
        assert (row.owner, row.backend, row.operation, row.reduced) == ("torch-ddp", "torch_native", "sum", ("dp_replicate",))
        assert (row.group_size, row.copies, row.scale, row.stored) == (4, 4, 1.0, ())


def test_gradients_of_a_half_precision_model_are_declared_to_travel_as_fp32():
    table = explain(toy_model().bfloat16(), ParallelPlan(dp_replicate=2))
    assert {(row.param_dtype, row.dtype) for row in table.rows} == {("torch.bfloat16", "torch.float32")}


@pytest.mark.parametrize("plan", [ParallelPlan(dp_shard=2), ParallelPlan(dp_shard=2, dp_replicate=2)], ids=["sharded", "hybrid"])
def test_a_sharded_plan_is_refused_and_the_plugin_that_serves_it_named(plan):
    error = refused(plan)
    assert isinstance(error, OwnershipError)
    assert "torch-ddp" in str(error)
    assert "declined: dp_shard=2 shards parameters; set dp_shard=1, or install and enable torch-fsdp2" in str(error)


class ExecutesEverything:
    """Claims every axis that splits the forward, so that owners are asked about it."""

    @hookimpl
    def own_axis(self, plan, layouts):
        return tuple(AxisClaim(axis=axis, executor=lambda: None, backend="double") for axis in plan.executed_axes)


@pytest.mark.parametrize("axes", [{"cp": 2}, {"pp": 2}])
def test_axes_that_the_wrapper_does_not_reduce_over_are_refused(axes):
    with pytest.raises(MixleError) as caught:
        explain(nn.Linear(4, 4), ParallelPlan(dp_replicate=2, **axes), plugins={"double": ExecutesEverything(), "all": Declares(*axes)})
    assert "declined: pp, cp and ep are not reduced by DistributedDataParallel; set pp, cp and ep to 1" in str(caught.value)


class Declares:
    def __init__(self, axis):
        self.axis = axis

    @hookimpl
    def declare_layout(self, model, plan):
        if self.axis == "cp":
            return None
        return ModelLayout(axis=self.axis, modules={"": ModuleLayout(parameters={"{weight,bias}": Replica("partial")})})


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_an_axis_that_nobody_executes_is_refused(axis):
    with pytest.raises(CapabilityError, match=f"exactly one executor .*: {axis}") as caught:
        explain(toy_model(), ParallelPlan(dp_replicate=2, **{axis: 2}), plugins={"toy": ToyLayout()})
    assert "set the axis to 1, or install and enable a plugin that executes it" in str(caught.value)


def test_a_plan_for_one_process_belongs_to_the_core():
    table = explain(toy_model(), ParallelPlan(gradient_accumulation_steps=8))
    assert {row.owner for row in table.rows} == {"local"}
    ((_, answer),) = load_plugins(["torch-ddp"]).ask("own_reduction", plan=table.plan, layouts=None)
    assert answer == Refusal("dp_replicate=1 leaves no data axis to reduce over", "set dp_replicate above 1")


WRAPPED = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "gradient hooks": lambda model: (model.weight.register_hook(lambda gradient: gradient), model)[1],
}


def already(kind):
    with pytest.raises(CapabilityError, match=f"already carries {kind}"):
        attach(WRAPPED[kind](nn.Linear(4, 4)), ParallelPlan(dp_replicate=2))


@pytest.mark.parametrize("kind", list(WRAPPED))
def test_a_model_that_something_else_reduces_is_refused(ranks, kind):
    ranks(already, 2, kind)


def too_small():
    attach(toy_model(), ParallelPlan(dp_replicate=2))


def test_a_world_of_another_size_is_refused(ranks):
    for outcome in ranks(too_small, 3, check=False):
        assert outcome.error == "CapabilityError"
        assert "world size is 3" in outcome.message and "the plan needs 2 (dp_replicate=2)" in outcome.message

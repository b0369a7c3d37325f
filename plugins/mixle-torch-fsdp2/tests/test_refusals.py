"""What the plugin claims, and what it refuses with the way out, before any process is started."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

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
from mixle_core.testing import ToyLayout, tied_toy_model, toy_model

FSDP2 = ParallelPlan(dp_shard=2)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)


def tied_across_units():
    model = Blocks()
    model.blocks[1].weight = model.blocks[0].weight
    return model


def tied_to_the_root():
    model = Blocks()
    model.head.weight = model.blocks[1].weight
    return model


def one_block_in_two_places():
    model = Blocks()
    model.blocks[1] = model.blocks[0]
    return model


def scalar():
    model = Blocks()
    model.blocks[0].scale = nn.Parameter(torch.tensor(1.0))
    return model


def two_dtypes_in_a_unit():
    model = Blocks()
    model.blocks[1].extra = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    return model


IN_ONE = "and fully_shard gathers a parameter in one; untie them, declare units in a layout that keep both in one unit or outside of all"
UNFIT = {
    tied_across_units: "blocks.0.weight and blocks.1.weight are one tied parameter in two units (blocks.0 and blocks.1), " + IN_ONE,
    tied_to_the_root: "blocks.1.weight and head.weight are one tied parameter in two units (blocks.1 and the root), " + IN_ONE,
    one_block_in_two_places: "are one tied parameter in two units",
    scalar: "blocks.0.scale has no dimension to shard; give it the shape [1], or set dp_shard=1",
    two_dtypes_in_a_unit: "blocks.1.bias is torch.float32 and blocks.1.extra is torch.bfloat16 in one unit (blocks.1)",
}


@pytest.mark.parametrize("build", list(UNFIT), ids=lambda build: build.__name__)
def test_what_fully_shard_cannot_hold_is_refused_with_the_way_out(build):
    with pytest.raises(OwnershipError) as caught:
        explain(build(), FSDP2)
    assert f"declined: {UNFIT[build]}" in str(caught.value) or UNFIT[build] in str(caught.value)
    assert "or set dp_shard=1" in str(caught.value)


class KeepsBothInOne:
    """A layout that names no unit of the tied parameters."""

    @hookimpl
    def declare_layout(self, model, plan):
        return ModelLayout(axis="tp", modules={}, units=("head",))


def test_a_layout_whose_units_keep_tied_parameters_together_is_the_way_out():
    table = explain(tied_across_units(), FSDP2, plugins={"units": KeepsBothInOne()})
    assert table["blocks.0.weight"].aliases == ("blocks.1.weight",)


def test_frozen_parameters_may_have_another_dtype():
    model = two_dtypes_in_a_unit()
    model.blocks[1].extra.requires_grad_(False)
    assert len(explain(model, FSDP2).rows) == 7


@pytest.mark.parametrize("plan", [FSDP2, ParallelPlan(dp_replicate=2, dp_shard=4)], ids=["fsdp2", "hsdp2x4"])
def test_every_trainable_parameter_of_a_sharded_plan_is_claimed(plan):
    model = tied_toy_model()
    model.norm.weight.requires_grad_(False)
    table = explain(model, plan)
    assert {row.name for row in table.rows} == {name for name, _ in model.named_parameters()} - {"norm.weight"}
    for row in table.rows:
        assert (row.owner, row.backend, row.operation, row.scale) == ("torch-fsdp2", "torch_native", "sum", 1.0)
        assert (row.stored, row.copies, row.group_size) == (("dp_shard",), plan.dp_replicate, plan.world_size)
        assert row.stages == (("dp_shard",), ("dp_replicate",))[: len(row.reduced)]


def test_gradients_of_a_half_precision_model_are_declared_to_travel_as_fp32():
    table = explain(toy_model().bfloat16(), FSDP2)
    assert {(row.param_dtype, row.dtype) for row in table.rows} == {("torch.bfloat16", "torch.float32")}


def test_a_plan_without_sharding_is_refused():
    with pytest.raises(OwnershipError, match=r"torch-fsdp2 .*declined: dp_shard=1 leaves nothing to shard; set dp_shard above 1"):
        explain(toy_model(), ParallelPlan(dp_replicate=2))


def test_a_plan_for_one_process_belongs_to_the_core():
    table = explain(toy_model(), ParallelPlan(gradient_accumulation_steps=8))
    assert {row.owner for row in table.rows} == {"local"}
    ((_, answer),) = load_plugins(["torch-fsdp2"]).ask("own_reduction", plan=table.plan, layouts=None)
    assert answer == Refusal("dp_shard=1 leaves nothing to shard", "set dp_shard above 1")


class Executes:
    """Claims and declares one axis that splits the forward, so that owners are asked about it."""

    def __init__(self, axis):
        self.axis = axis

    @hookimpl
    def own_axis(self, plan, layouts):
        return AxisClaim(axis=self.axis, executor=lambda: None, backend="double")

    @hookimpl
    def declare_layout(self, model, plan):
        if self.axis == "cp":
            return None
        return ModelLayout(axis=self.axis, modules={"": ModuleLayout(parameters={"{weight,bias}": Replica("partial")})})


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_axes_that_fully_shard_does_not_reduce_over_are_refused(axis):
    with pytest.raises(MixleError) as caught:
        explain(nn.Linear(4, 4), ParallelPlan(dp_shard=2, **{axis: 2}), plugins={"double": Executes(axis)})
    assert "declined: pp, cp and ep are not reduced by fully_shard; set pp, cp and ep to 1" in str(caught.value)


@pytest.mark.parametrize("axis", ["tp", "pp", "cp", "ep"])
def test_an_axis_that_nobody_executes_is_refused(axis):
    with pytest.raises(CapabilityError, match=f"exactly one executor .*: {axis}") as caught:
        explain(toy_model(), ParallelPlan(dp_shard=2, **{axis: 2}), plugins={"toy": ToyLayout()})
    assert "set the axis to 1, or install and enable a plugin that executes it" in str(caught.value)


def sharded_already():
    model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(CapabilityError, match=r"already carries FSDPLinear .*DTensor parameters"):
        attach(model, FSDP2)


def test_a_model_that_is_sharded_already_is_refused(ranks):
    ranks(sharded_already, 2)

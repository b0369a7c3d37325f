"""Every plan is refused with what was measured and the way out, in one process and without megatron-fsdp."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from mixle_megatron_fsdp.plugin import BACKEND, own_reduction
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
    Shard,
    explain,
    hookimpl,
)
from mixle_core.testing import OwnsEverything, ToyLayout, toy_model


class Executes:
    """Claims every axis that splits the forward, so that owners are asked about it."""

    @hookimpl
    def own_axis(self, plan, layouts):
        return tuple(AxisClaim(axis=axis, executor=lambda: None, backend=BACKEND) for axis in plan.executed_axes)


class Declares:
    """One role for the parameters of a linear, on one axis."""

    def __init__(self, axis, role):
        self.axis, self.role = axis, role

    @hookimpl
    def declare_layout(self, model, plan):
        if self.axis == "cp":
            return None
        return ModelLayout(axis=self.axis, modules={"": ModuleLayout(parameters={"{weight,bias}": self.role})})


def refused(plan, *, model=None, plugins=None, backend=None):
    with pytest.raises(MixleError) as caught:
        explain(model or toy_model(), plan, plugins=plugins, backend=backend)
    return caught.value


SHARDED = {
    "one backward": (ParallelPlan(dp_shard=2), "runs on CUDA only (its constructor calls torch.cuda.current_device"),
    "hybrid": (ParallelPlan(dp_replicate=2, dp_shard=2), "runs on CUDA only"),
    "accumulation": (
        ParallelPlan(dp_shard=2, gradient_accumulation_steps=3),
        "reduces every bucket in each of the 3 backwards of an update, and no_sync() changes nothing: 9 reductions in place of 3",
    ),
    "microbatches": (ParallelPlan(dp_shard=2, microbatches=4), "in each of the 4 backwards of an update"),
    "hybrid, accumulation": (
        ParallelPlan(dp_replicate=2, dp_shard=2, gradient_accumulation_steps=3),
        "sums over dp_replicate what it has summed before, inside no_sync() too: gradients were 2.5 off after three backwards",
    ),
}


@pytest.mark.parametrize("name", list(SHARDED))
def test_a_sharded_plan_is_refused_with_what_was_measured_and_the_plugin_that_serves_it(name):
    plan, reason = SHARDED[name]
    error = refused(plan)
    assert isinstance(error, OwnershipError)
    assert "megatron-fsdp" in str(error) and f"{reason}" in str(error)
    assert "; enable torch-fsdp2 (backend torch_native)" in str(error)


def test_without_shards_the_plugins_that_serve_the_plan_are_named():
    error = refused(ParallelPlan(dp_replicate=2))
    assert "dp_shard=1 leaves megatron-fsdp nothing to shard; enable torch-ddp for dp_replicate, dtensor-tp for tp alone" in str(error)


ROLES = {
    "partial": (Replica("partial"), "the gradient of bias is partial on tp, and megatron-fsdp copies this rank's term of it"),
    "slice": (Shard(0), "bias is a slice on tp: megatron-fsdp overwrites plain slices with those of the first tp rank"),
    "complete": (Replica("complete"), "runs on CUDA only"),
}


@pytest.mark.parametrize("role", list(ROLES))
def test_a_role_on_tp_that_it_gets_wrong_is_named_with_its_parameter(role):
    declared, reason = ROLES[role]
    plugins = {"executes": Executes(), "declares": Declares("tp", declared)}
    assert reason in str(refused(ParallelPlan(dp_shard=2, tp=2), model=nn.Linear(4, 4), plugins=plugins))


def test_a_frozen_parameter_that_is_partial_on_tp_is_not_the_reason():
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    plugins = {"executes": Executes(), "declares": Declares("tp", Replica("partial"))}
    assert "the gradient of weight is partial" in str(refused(ParallelPlan(dp_shard=2, tp=2), model=model, plugins=plugins))


def test_a_whole_model_under_tp_is_refused_for_its_first_partial_gradient():
    error = refused(ParallelPlan(dp_shard=2, tp=2), plugins={"executes": Executes(), "toy": ToyLayout()})
    assert "the gradient of blocks.0.down.bias is partial on tp" in str(error)


@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_an_axis_that_was_never_measured_is_refused_as_that(axis):
    plugins = {"executes": Executes(), "declares": Declares(axis, Replica("partial"))}
    error = refused(ParallelPlan(dp_shard=2, **{axis: 2}), model=nn.Linear(4, 4), plugins=plugins)
    assert "under pp, cp and ep was never compared with one process; set pp, cp and ep to 1" in str(error)


@pytest.mark.parametrize("plan", [plan for plan, _ in SHARDED.values()], ids=list(SHARDED))
def test_asked_for_by_its_backend_it_says_why_not(plan):
    error = refused(plan, backend=BACKEND)
    assert isinstance(error, CapabilityError)
    assert f"backend {BACKEND}: no plugin of it owns" in str(error) and "declined: " in str(error)


@pytest.mark.parametrize("plan", [plan for plan, _ in SHARDED.values()], ids=list(SHARDED))
def test_beside_another_owner_nobody_has_to_choose(plan):
    table = explain(toy_model(), plan, plugins={"other": OwnsEverything()})
    assert table.owners == ("other",)


def test_no_plan_gets_a_bid():
    sizes = itertools.product((1, 2), (1, 2), (1, 2), (1, 2), (1, 3))
    for dp_replicate, dp_shard, cp, pp, steps in sizes:
        plan = ParallelPlan(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, pp=pp, gradient_accumulation_steps=steps)
        answer = own_reduction(plan=plan, layouts=None)  # without tp the plan alone settles it
        assert isinstance(answer, Refusal)
        assert answer.reason and answer.remedy.startswith(("enable ", "set "))


def test_asking_imports_neither_megatron_fsdp_nor_torch():
    code = (
        "import sys, mixle_core as mx\n"
        "from mixle_megatron_fsdp import plugin\n"
        "plugin.own_reduction(plan=mx.ParallelPlan(dp_shard=2), layouts=None)\n"
        "print(sorted({'torch', 'megatron_fsdp'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"

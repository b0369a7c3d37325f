"""The bias of a row-parallel linear: one name, several places to add it. Each is exact or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mixle_core import (
    Boundary,
    LayoutError,
    ModelLayout,
    ModuleLayout,
    ParallelPlan,
    Replica,
    Shard,
    Term,
    attach,
    explain,
    hookimpl,
    load_plugins,
)
from mixle_core.audit import reference_model, relative_error
from mixle_core.testing import run_ranks

WHOLE, PARTIAL, ROWS = Replica("complete"), Replica("partial"), Shard(0)
SLICE = {0: Boundary(outside=WHOLE, inside=Shard(-1))}
SUM = Boundary(outside=WHOLE, inside=Term())


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(4))

    def reset_parameters(self):
        nn.init.normal_(self.bias)

    def forward(self, values):
        return values + self.bias


class Row(nn.Module):
    """The bias is added inside the linear, or by a module after it."""

    def __init__(self, *, inside):
        super().__init__()
        self.linear = nn.Linear(8, 4, bias=inside)
        self.after = nn.Identity() if inside else Bias()

    def forward(self, values):
        return self.after(self.linear(values))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.row = Row(inside=True)

    def forward(self, values):
        return self.row(values)


def inside(role, once=()):
    return {"linear": ModuleLayout(parameters={"weight": Shard(1), "bias": role}, inputs=SLICE, output=SUM, once=once)}


def after(output, bias):
    return {"linear": ModuleLayout(parameters={"weight": Shard(1)}, inputs=SLICE, output=output), "after": bias}


def further_out(once):
    """The sum is declared two modules above the linear."""
    linear = ModuleLayout(parameters={"weight": Shard(1)}, inputs=SLICE)
    if once:
        return {"row": ModuleLayout(parameters={"linear.bias": PARTIAL}, output=SUM, once=("linear.bias",)), "row.linear": linear}
    return {
        "row": ModuleLayout(output=SUM),
        "row.linear": ModuleLayout(parameters={"weight": Shard(1), "bias": WHOLE}, inputs=SLICE),
    }


CASES = {
    "before-the-sum": (lambda: Row(inside=True), inside(PARTIAL)),
    "before-the-sum-as-complete": (lambda: Row(inside=True), inside(WHOLE)),
    "before-the-sum-once": (lambda: Row(inside=True), inside(PARTIAL, ("bias",))),
    "before-the-sum-once-as-complete": (lambda: Row(inside=True), inside(WHOLE, ("bias",))),
    "after-the-sum": (lambda: Row(inside=False), after(SUM, ModuleLayout(parameters={"bias": WHOLE}))),
    "after-a-scatter-of-rows": (
        lambda: Row(inside=False),
        after(
            Boundary(outside=ROWS, inside=Term()),
            ModuleLayout(parameters={"bias": PARTIAL}, output=Boundary(outside=WHOLE, inside=ROWS)),
        ),
    ),
    "before-a-sum-further-out": (Outer, further_out(once=False)),
    "before-a-sum-further-out-once": (Outer, further_out(once=True)),
}
EXACT = ("before-the-sum-once", "after-the-sum", "after-a-scatter-of-rows", "before-a-sum-further-out-once")
UNDER = {"before-a-sum-further-out-once": "row.linear.bias", "before-the-sum-once": "linear.bias"}


class Declares:
    """A layout plugin that says what the case says."""

    def __init__(self, name):
        self.name = name

    @hookimpl
    def declare_layout(self, model, plan):
        return ModelLayout(axis="tp", modules=CASES[self.name][1])


def on_meta(name):
    with torch.device("meta"):
        return CASES[name][0]()


def one_update_on_rank(name):
    """Errors of the output and of the bias gradient against one process, and the bias gradient itself."""
    reduction = attach(on_meta(name), ParallelPlan(tp=2), plugins={"layout": Declares(name)}, seed=3)
    reference = reference_model(lambda: on_meta(name), 3)
    generator = torch.Generator().manual_seed(0)
    values, weights = torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)
    output, wanted = reduction.module(values), reference(values)
    (output * weights).sum().backward()
    (wanted * weights).sum().backward()
    bias = UNDER.get(name, "after.bias")
    gradient, wanted_gradient = reduction.finish(6).gradients[bias], reference.get_parameter(bias).grad / 6
    return relative_error(output.detach(), wanted.detach()), relative_error(gradient, wanted_gradient), gradient.tolist()


@pytest.mark.parametrize("name", EXACT)
def test_output_and_bias_gradient_equal_one_process(name):
    outcomes = run_ranks(one_update_on_rank, 2, name, env={"MIXLE_PLUGINS": "dtensor-tp"}, timeout_s=60)
    assert all(outcome.value[0] <= 1e-6 and outcome.value[1] <= 1e-6 for outcome in outcomes), outcomes
    assert outcomes[0].value[2] == outcomes[1].value[2]


@pytest.mark.parametrize("name", ["before-the-sum", "before-the-sum-as-complete", "before-the-sum-once-as-complete"])
def test_a_bias_that_every_rank_would_add_is_refused_before_anything_runs(name):
    with pytest.raises(LayoutError, match=r"bias.*once"):
        explain(on_meta(name), ParallelPlan(tp=2), plugins=load_plugins(["dtensor-tp"], extra={"layout": Declares(name)}))


def test_a_bias_under_a_sum_declared_further_out_is_refused_on_every_rank_by_name():
    outcomes = run_ranks(one_update_on_rank, 2, "before-a-sum-further-out", env={"MIXLE_PLUGINS": "dtensor-tp"}, timeout_s=60, check=False)
    assert [outcome.error for outcome in outcomes] == ["LayoutError"] * 2
    assert all(outcome.message.startswith("row.linear.bias on tp: row.linear.weight is cut along its inputs") for outcome in outcomes)

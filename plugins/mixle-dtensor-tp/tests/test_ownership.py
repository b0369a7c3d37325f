"""What the plugin claims and declines, what an update costs, and that a wrong declaration stops the first update."""

from __future__ import annotations

import pytest
import torch
from mixle_dtensor_tp import plugin
from torch import nn

from mixle_core import (
    Boundary,
    ModelLayout,
    ModuleLayout,
    OwnershipError,
    ParallelPlan,
    Replica,
    Shard,
    Term,
    attach,
    explain,
    hookimpl,
    load_plugins,
)
from mixle_core.runtime import counted_traffic
from mixle_core.testing import ToyLayout, next_token_loss, run_ranks, token_batch, toy_model

ENV = {"MIXLE_PLUGINS": "dtensor-tp"}
PLANS = {"tp": ParallelPlan(tp=2), "sp": ParallelPlan(tp=2, sequence_parallel=True)}
WHOLE = Replica("complete")


def toy_plugins(layout=None):
    return load_plugins(["dtensor-tp"], extra={"toy": layout or ToyLayout()})


def test_the_table_says_what_is_summed_what_is_left_alone_and_what_is_final():
    table = explain(toy_model(), PLANS["tp"], plugins=toy_plugins())
    assert table.executors == {"tp": "dtensor-tp"}
    said = {row.name: (row.owner, row.operation, row.reduced, row.copies) for row in table.rows}
    assert said["blocks.0.head_scale.weight"] == ("dtensor-tp", "sum", ("tp",), 2)
    assert said["blocks.1.down.bias"] == ("dtensor-tp", "sum", ("tp",), 2)
    assert said["norm.weight"] == ("dtensor-tp", "none", (), 2)
    assert said["blocks.0.gate_up.weight"] == ("local", "none", (), 1)
    assert {row.backend for row in table.rows} == {"torch_native", "local"}


def test_with_sequence_parallelism_the_norms_are_summed():
    table = explain(toy_model(), PLANS["sp"], plugins=toy_plugins())
    assert all(row.operation == "sum" for row in table.rows if "norm" in row.name or "branch" in row.name)


def test_nothing_is_claimed_without_tp():
    plan = ParallelPlan(dp_replicate=2)
    layouts = attach(toy_model(), ParallelPlan(), plugins=toy_plugins()).layouts
    assert plugin.own_axis(plan, layouts) is None and plugin.own_reduction(plan, layouts) is None


@pytest.mark.parametrize("data", [{"dp_replicate": 2}, {"dp_shard": 2}])
def test_replicas_of_a_plan_with_a_data_axis_are_left_to_its_owner(data):
    with pytest.raises(OwnershipError) as refused:
        explain(toy_model(), ParallelPlan(tp=2, **data), plugins=toy_plugins())
    assert "declined: another axis than tp is pending, and its owner sums over tp too; install and enable torch-ddp" in str(refused.value)


class Mlp(nn.Module):
    """A column and a row matrix, after a whole layer or alone; no parameter has a partial gradient."""

    def __init__(self, first):
        super().__init__()
        self.first = nn.Linear(8, 8) if first else nn.Identity()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, values):
        return self.down(torch.tanh(self.up(self.first(values))))


class MlpLayout:
    @hookimpl
    def declare_layout(self, model, plan):
        enter, leave = Boundary(outside=WHOLE, inside=Replica("partial")), Boundary(outside=WHOLE, inside=Term())
        modules = {
            "up": ModuleLayout(parameters={"{weight,bias}": Shard(0)}, inputs={0: enter}),
            "down": ModuleLayout(parameters={"weight": Shard(1)}, output=leave),
        }
        if isinstance(model.first, nn.Linear):
            modules["first"] = ModuleLayout(parameters={"{weight,bias}": WHOLE})
        return ModelLayout(axis="tp", modules=modules)


def toy_update(reduction, update):
    loss, tokens = next_token_loss(reduction.module, token_batch(update, 0, 0))
    loss.backward()
    reduced = reduction.finish(tokens)
    reduction.zero()
    return reduced


def traffic_on_rank(plan):
    """Per update: the owner's collectives and bytes, and the control collectives by operation; then the bytes of partial rows."""
    reduction = attach(toy_model(), plan, plugins={"toy": ToyLayout()})
    seen = []
    for update in range(3):
        before = counted_traffic("mixle:control:")
        (owner, _) = toy_update(reduction, update).owners
        control = {key.partition("|")[2]: now.num_collectives for key, now in counted_traffic("mixle:control:").items()}
        for key, earlier in before.items():
            control[key.partition("|")[2]] -= earlier.num_collectives
        seen.append((owner.owner, owner.num_collectives, owner.payload_bytes, {name: n for name, n in control.items() if n}))
    return seen, sum(row.payload_bytes for row in reduction.table.rows), sum(row.operation == "sum" for row in reduction.table.rows)


@pytest.mark.parametrize(("name", "num_partial"), [("tp", 4), ("sp", 14)])
def test_an_update_makes_one_gradient_all_reduce_however_many_replicas_are_partial(name, num_partial):
    for outcome in run_ranks(traffic_on_rank, 2, PLANS[name], env=ENV, timeout_s=60):
        seen, payload_bytes, summed = outcome.value
        assert summed == num_partial
        assert [entry[:3] for entry in seen] == [("dtensor-tp", 1, payload_bytes)] * 3


def test_confirmed_declarations_cost_no_further_collectives():
    for outcome in run_ranks(traffic_on_rank, 2, PLANS["tp"], env=ENV, timeout_s=60):
        controls = [entry[3] for entry in outcome.value[0]]
        assert controls[0].keys() == {"allreduce", "allgather"}
        assert controls[1:] == [{"allreduce": 1}, {"allreduce": 1}]


def mlp_traffic_on_rank(first):
    reduction = attach(Mlp(first), PLANS["tp"], plugins={"mlp": MlpLayout()})
    reduction.module(torch.ones(3, 8)).sum().backward()
    return {owner.owner: (owner.num_parameters, owner.num_collectives) for owner in reduction.finish(3).owners}


@pytest.mark.parametrize(("first", "owners"), [(True, {"dtensor-tp": (2, 0), "local": (3, 0)}), (False, {"local": (3, 0)})])
def test_an_update_without_partial_replicas_makes_no_gradient_collective(first, owners):
    for outcome in run_ranks(mlp_traffic_on_rank, 2, first, env=ENV, timeout_s=60):
        assert outcome.value == owners


WRONG = {
    "shared-by-heads-as-complete": ("tp", "head_scale", "complete"),
    "whole-norm-as-partial": ("tp", "norm", "partial"),
    "token-wise-norm-as-complete": ("sp", "norm", "complete"),
}


def wrong_on_rank(case):
    plan, module, gradient = WRONG[case]
    toy_update(attach(toy_model(), PLANS[plan], plugins={"toy": ToyLayout({module: Replica(gradient)})}), 0)


@pytest.mark.parametrize("case", list(WRONG))
def test_a_wrong_declaration_is_an_error_on_every_rank_at_the_first_update(case):
    _, module, gradient = WRONG[case]
    seen = "the ranks' gradients differ" if gradient == "complete" else "all ranks computed the same gradient"
    outcomes = run_ranks(wrong_on_rank, 2, case, env=ENV, timeout_s=60, check=False)
    assert [outcome.error for outcome in outcomes] == ["DeclarationError"] * 2
    for block in (0, 1):
        said = f"blocks.{block}.{module}.weight on tp: declared Replica({gradient}), but {seen}"
        assert all(said in outcome.message for outcome in outcomes), outcomes[0].message

"""Tensor and sequence parallelism alone equal one process: gradients, both norms, parameters after updates, copies to the bit."""

from __future__ import annotations

import functools
import math

import attrs
import pytest
import torch

from mixle_core import ParallelPlan, attach
from mixle_core.audit import reference_model, verify
from mixle_core.testing import ToyLayout, next_token_loss, run_ranks, tied_toy_model, token_batch, toy_model

PLANS = {
    "tp2": ParallelPlan(tp=2),
    "tp2-sp": ParallelPlan(tp=2, sequence_parallel=True),
    "tp4": ParallelPlan(tp=4),
    "tp4-sp": ParallelPlan(tp=4, sequence_parallel=True),
}
ENV = {"MIXLE_PLUGINS": "dtensor-tp"}


def toy_with_frozen(*parts):
    def build():
        model = toy_model()
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.requires_grad_(False)
        return model

    return build


def branch_unused_in_second_update(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": update != 1}


def branch_in_last_backward(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": backward > 0}


@attrs.frozen
class Variant:
    """What differs from three unclipped updates of one backward each."""

    build: object = toy_model
    batch: object = token_batch
    windows: tuple[int, ...] | None = None
    max_grad_norm: float | None = None
    plan: dict = attrs.Factory(dict)


VARIANTS = {
    "one-backward": Variant(),
    "one-backward-clipped": Variant(max_grad_norm=0.05),
    "four-backwards-and-a-trailing-window-of-two": Variant(windows=(4, 2, 4), plan={"gradient_accumulation_steps": 4}),
    "four-backwards-clipped": Variant(windows=(4, 1), max_grad_norm=0.05, plan={"gradient_accumulation_steps": 4}),
    "two-batches-of-two-microbatches": Variant(windows=(4, 3), plan={"gradient_accumulation_steps": 2, "microbatches": 2}),
    "tied-embedding-and-head": Variant(tied_toy_model, max_grad_norm=0.05),
    "frozen-embedding-norms-and-block": Variant(toy_with_frozen("embed", "norm", ".1."), windows=(1, 1), max_grad_norm=0.05),
    "frozen-replicas-within-sharded-computation": Variant(toy_with_frozen("down.bias", "head_scale"), windows=(1, 1)),
    "frozen-slices": Variant(toy_with_frozen("down.weight", "gate_up", "head.weight", "embed"), windows=(1, 1)),
    "recomputed-blocks": Variant(windows=(2, 1), plan={"gradient_accumulation_steps": 2, "activation_checkpointing": True}),
    "branch-unused-in-one-window": Variant(batch=branch_unused_in_second_update, plan={"unused_parameters": True}),
    "branch-in-the-last-backward-only": Variant(batch=branch_in_last_backward, plan={"gradient_accumulation_steps": 2}),
}


def verify_on_rank(plan, name):
    variant = VARIANTS[name]
    return verify(
        variant.build,
        attrs.evolve(plan, **variant.plan),
        loss=next_token_loss,
        batch=variant.batch,
        windows=variant.windows,
        max_grad_norm=variant.max_grad_norm,
        plugins={"toy": ToyLayout()},
    )


ON_FOUR_RANKS = (
    "one-backward-clipped",
    "four-backwards-and-a-trailing-window-of-two",
    "tied-embedding-and-head",
    "frozen-embedding-norms-and-block",
    "recomputed-blocks",
    "branch-unused-in-one-window",
)
CELLS = [(name, variant) for name, plan in PLANS.items() for variant in (VARIANTS if plan.tp == 2 else ON_FOUR_RANKS)]


def verify_all_on_rank(plan_name):
    return {variant: verify_on_rank(PLANS[plan_name], variant) for name, variant in CELLS if name == plan_name}


@functools.cache
def reports(plan_name):
    """Every variant in one start of the processes: per rank, variant -> report."""
    outcomes = run_ranks(verify_all_on_rank, PLANS[plan_name].tp, plan_name, env=ENV, timeout_s=60)
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(("plan_name", "variant"), CELLS)
def test_equals_one_process(plan_name, variant):
    mine = [of_rank[variant] for of_rank in reports(plan_name)]
    assert len(mine) == PLANS[plan_name].tp
    assert all(report.passed(1e-5) for report in mine), mine[0]


@pytest.mark.parametrize("plan_name", list(PLANS))
def test_every_rank_sees_the_norms_and_tokens_of_the_whole(plan_name):
    for of_rank in reports(plan_name):
        updates = of_rank["four-backwards-and-a-trailing-window-of-two"].updates
        assert all(update.norm_error <= 1e-6 and update.inf_norm_error <= 1e-6 for update in updates)
        assert [update.num_tokens for update in updates] == [4 * 14, 2 * 14, 4 * 14]


NORMS = (1.0, 2.0, 3.0, math.inf)


def norms_on_rank(plan):
    """Per kind of norm: this rank's answer, and that of one process."""
    reduction, reference = attach(toy_model(), plan, plugins={"toy": ToyLayout()}), reference_model(toy_model, 0)
    for module in (reduction.module, reference):
        next_token_loss(module, token_batch(0, 0, 0))[0].backward()
    reduced = reduction.finish(14)
    gradients = [parameter.grad / 14 for parameter in reference.parameters()]
    return [(reduced.norm(kind), float(torch.nn.utils.get_total_norm(gradients, kind))) for kind in NORMS]


@pytest.mark.parametrize("plan_name", ["tp4", "tp4-sp"])
def test_every_rank_counts_each_value_once_in_a_norm_of_any_kind(plan_name):
    outcomes = run_ranks(norms_on_rank, 4, PLANS[plan_name], env=ENV, timeout_s=60)
    assert all(outcome.value == outcomes[0].value for outcome in outcomes)
    assert all(ours == pytest.approx(wanted, rel=1e-6) for ours, wanted in outcomes[0].value)


@pytest.mark.parametrize("plan_name", ["tp2", "tp2-sp"])
def test_a_branch_first_unused_after_the_first_update_stops_every_rank(plan_name):
    outcomes = run_ranks(surprise_on_rank, 2, PLANS[plan_name], env=ENV, timeout_s=60, check=False)
    assert [outcome.error for outcome in outcomes] == ["LedgerError", "LedgerError"]
    assert all("blocks.0.branch" in outcome.message for outcome in outcomes), outcomes[0].message


def surprise_on_rank(plan):
    verify(toy_model, plan, loss=next_token_loss, batch=branch_unused_in_second_update, plugins={"toy": ToyLayout()})

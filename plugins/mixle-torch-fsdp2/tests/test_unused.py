"""Parameters and whole units that some backwards do not use: exact where it can be, else an error on every rank."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
from torch import nn

from mixle_core import LedgerError, MixleError, ParallelPlan, UsageError, attach
from mixle_core.audit import verify
from mixle_core.testing import next_token_loss, token_batch, toy_model

FSDP2 = ParallelPlan(dp_shard=2)
HSDP = ParallelPlan(dp_replicate=2, dp_shard=2)
WAY_OUT = "ParallelPlan(unused_parameters=True)"


def batch(**options):
    """What a rank trains on: tokens, and an option of the model computed from (update, backward, data rank)."""
    return lambda *at: {"ids": token_batch(*at), **{name: value(*at) for name, value in options.items()}}


USES = {
    "on-one-rank-only": batch(use_branch=lambda u, b, d: d == 0),
    "on-one-rank-in-its-first-backward": batch(use_branch=lambda u, b, d: d == 0 and b == 0),
    "in-the-last-backward-only": batch(use_branch=lambda u, b, d: b == 1),
    "under-no-sync-only": batch(use_branch=lambda u, b, d: b == 0),
    "under-no-sync-only-from-the-second-update-on": batch(use_branch=lambda u, b, d: u == 0 or b == 0),
    "nowhere-in-the-second-update": batch(use_branch=lambda u, b, d: u != 1),
    "on-one-rank-and-nowhere-in-the-second-update": batch(use_branch=lambda u, b, d: d == 0 and u != 1),
    "a-unit-skipped-in-the-first-update": batch(skip_last=lambda u, b, d: u == 0),
    "a-unit-skipped-in-the-second-update": batch(skip_last=lambda u, b, d: u == 1),
    "a-unit-skipped-in-the-first-backward": batch(skip_last=lambda u, b, d: b == 0),
}


def cells(plan, uses):
    # an optimizer that divides by the gradient makes large differences of rounding where a true gradient is nearly zero
    options = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)} if plan.precision == "bf16" else {}
    return {use: verify(toy_model, plan, loss=next_token_loss, batch=USES[use], **options) for use in uses}


@pytest.fixture
def check(ranks):
    def checked(plan, uses, tolerance=1e-5):
        reports = ranks(cells, plan.world_size, plan, uses)[0].value
        assert {use: report.error for use, report in reports.items() if not report.passed(tolerance)} == {}
        assert len(reports) == len(uses)

    return checked


FOUND = [use for use in USES if "in-the-second-update" not in use]
LEFT_OUT = [use for use in USES if "in-the-second-update" in use or "a-unit" in use or "one-rank" in use]


def test_use_that_varies_is_found_by_the_first_update(check):
    check(attrs.evolve(FSDP2, gradient_accumulation_steps=2), FOUND)


def test_the_same_in_bf16_where_accumulated_and_fresh_gradients_differ_in_dtype(check):
    plan = attrs.evolve(FSDP2, gradient_accumulation_steps=2, precision="bf16")
    check(plan, FOUND, tolerance=5e-2)
    check(attrs.evolve(plan, unused_parameters=True), ["on-one-rank-and-nowhere-in-the-second-update"], tolerance=5e-2)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_no_rank_used_has_no_gradient_and_does_not_decay_when_the_plan_says_so(check, steps):
    check(attrs.evolve(FSDP2, gradient_accumulation_steps=steps, unused_parameters=True), LEFT_OUT)


def test_hybrid_plans(check):
    uses = ["on-one-rank-only", "nowhere-in-the-second-update", "a-unit-skipped-in-the-second-update"]
    check(attrs.evolve(HSDP, gradient_accumulation_steps=2, unused_parameters=True), uses)


def trained(use, plan, updates):
    """Train; return the updates that ended well, and what ended the others."""
    reduction = attach(toy_model(), plan)
    done = []
    for update in range(updates):
        try:
            loss, tokens = next_token_loss(reduction.module, LATER[use](update, 0, reduction.mesh.rank))
            loss.backward()
            reduction.finish(tokens)
        except (MixleError, RuntimeError) as error:
            return done, type(error), str(error)
        reduction.zero()
        done.append(update)
    return done, None, ""


LATER = {
    "branch-by-no-rank": batch(use_branch=lambda u, b, d: u < 2),
    "branch-by-one-rank": batch(use_branch=lambda u, b, d: u < 2 or d == 0),
    "unit-by-no-rank": batch(skip_last=lambda u, b, d: u >= 2),
    "unit-by-one-rank": batch(skip_last=lambda u, b, d: u >= 2 and d == 1),
}


def surprises(uses):
    return {use: trained(use, FSDP2, 4) for use in uses}


def test_a_parameter_unused_after_it_was_used_everywhere_is_an_error_on_every_rank(ranks):
    parameters = {"branch-by-no-rank": "branch", "branch-by-one-rank": "branch", "unit-by-no-rank": "down"}
    for outcome in ranks(surprises, 2, list(parameters)):
        for use, name in parameters.items():
            done, kind, text = outcome.value[use]
            assert done == [0, 1]
            assert kind in ((LedgerError, UsageError) if "one" in use else (LedgerError,))
            assert f"blocks.1.{name}.weight: not reduced by torch-fsdp2" in text and "embed" not in text
            assert WAY_OUT in text


@pytest.mark.parametrize("plan", [FSDP2, attrs.evolve(HSDP, unused_parameters=True)], ids=["fsdp2", "hsdp2x2-may-vary"])
def test_a_unit_skipped_by_one_rank_ends_every_rank_within_the_timeout(ranks, plan):
    """fully_shard pairs collectives by order, so nothing is right from there on; gloo may even abort a rank."""
    outcomes = ranks(trained, plan.world_size, "unit-by-one-rank", attrs.evolve(plan, timeout_s=3), 4, check=False)
    assert len(outcomes) == plan.world_size
    for outcome in outcomes:
        assert outcome.seconds < 15
        if outcome.value is None:
            assert outcome.error != "Timeout" and outcome.exitcode != 0
        else:
            assert outcome.value[0] == [0, 1] and outcome.value[1] is not None


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, values, order):
        for number in order:
            values = torch.tanh(self.blocks[number](values))
        return values


ORDERS = {
    "each-drops-another": [(0, 1), (1, 2)],
    "other-order": [(0, 1, 2), (2, 1, 0)],
    "all-the-other-way-round": [(2, 1, 0), (2, 1, 0)],
}


def layers_in_order(case, unused_parameters):
    reduction = attach(Layers(), attrs.evolve(FSDP2, unused_parameters=unused_parameters))
    for update in range(3):
        order = ORDERS[case][reduction.mesh.rank] if update == 1 else (0, 1, 2)
        reduction.module(torch.ones(2, 4), order).sum().backward()
        try:
            reduction.finish(2)
        except LedgerError as error:
            return update, str(error)
        reduction.zero()
    return None


def all_orders():
    return {(case, flag): layers_in_order(case, flag) for case in ORDERS for flag in (None, True)}


def test_ranks_that_call_as_many_units_but_others_are_found_out(ranks):
    """Their collectives have equal sizes, so fully_shard exchanges parts of different layers and says nothing."""
    for outcome in ranks(all_orders, 2):
        found = outcome.value
        for flag in (None, True):
            assert found["all-the-other-way-round", flag] is None
            assert found["other-order", flag][0] == found["each-drops-another", flag][0] == 1
            assert "run the same microbatches and units on every rank" in found["other-order", flag][1]
        assert "run the same microbatches and units on every rank" in found["each-drops-another", True][1]
        assert "not reduced by torch-fsdp2" in found["each-drops-another", None][1]

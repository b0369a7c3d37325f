"""Gradients that come after their bucket has left, and windows that end differently on the ranks, are errors on every rank."""

from __future__ import annotations

import pytest

from mixle_core import LedgerError, MixleError, ParallelPlan, attach
from mixle_core.testing import next_token_loss, token_batch, toy_model

PLAN = ParallelPlan(dp_replicate=2, gradient_accumulation_steps=2, unused_parameters=False, timeout_s=10)


def two_forwards_then_two_backwards(reduction, batches):
    with reduction.no_sync():
        first, tokens = next_token_loss(reduction.module, batches[0])
    last, more = next_token_loss(reduction.module, batches[1])
    first.backward()
    last.backward()
    return tokens + more


def two_backwards_of_one_forward(reduction, batches):
    loss, tokens = next_token_loss(reduction.module, batches[0])
    loss.backward(retain_graph=True)
    loss.backward()
    return tokens


def a_penalty_behind_the_reduction(reduction, batches):
    loss, tokens = next_token_loss(reduction.module, batches[0])
    loss.backward()
    sum(p.pow(2).sum() for _, p in reduction.named_parameters()).backward()
    return tokens


def a_window_that_only_one_rank_ends(reduction, batches):
    with reduction.no_sync():
        loss, tokens = next_token_loss(reduction.module, batches[0])
        loss.backward()
    if reduction.mesh.rank == 0:
        next_token_loss(reduction.module, batches[1])[0].backward()
    return tokens


def finished(how):
    how = globals()[how]
    reduction = attach(toy_model(), PLAN)
    batches = [token_batch(0, backward, reduction.mesh.rank) for backward in range(2)]
    try:
        reduction.finish(how(reduction, batches))
    except MixleError as error:
        return type(error), str(error)
    return None, "accepted"


@pytest.mark.parametrize("how", [two_forwards_then_two_backwards, two_backwards_of_one_forward, a_penalty_behind_the_reduction])
def test_a_gradient_after_its_bucket_has_left_is_an_error_on_every_rank(ranks, how):
    for outcome in ranks(finished, 2, how.__name__):
        kind, text = outcome.value
        assert kind is LedgerError, text
        assert "22 of 22 parameters were not reduced exactly once" in text


def test_windows_that_end_differently_are_an_error_on_every_rank(ranks):
    for outcome in ranks(finished, 2, a_window_that_only_one_rank_ends.__name__):
        kind, text = outcome.value
        assert kind is LedgerError, text
        assert "ended their windows differently" in text

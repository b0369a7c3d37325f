"""A loss over the parameters themselves goes around fully_shard, so that nobody would sum it: an error on every rank."""

from __future__ import annotations

from mixle_core import LedgerError, MixleError, ParallelPlan, attach
from mixle_core.testing import next_token_loss, token_batch, toy_model


def penalised(behind):
    reduction = attach(toy_model(), ParallelPlan(dp_shard=2, timeout_s=10))
    penalty = sum(p.pow(2).sum() for _, p in reduction.named_parameters())
    loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, reduction.mesh.rank))
    loss.backward()
    if behind:
        penalty.backward()
    try:
        reduction.finish(tokens)
    except MixleError as error:
        return type(error), str(error)
    return None, "accepted"


def test_a_loss_over_the_parameters_themselves_is_an_error_on_every_rank(ranks):
    for outcome in ranks(penalised, 2, True):
        kind, text = outcome.value
        assert kind is LedgerError, text
        assert "22 of 22 parameters were not reduced exactly once" in text


def test_without_its_backward_nothing_is_wrong(ranks):
    assert [outcome.value for outcome in ranks(penalised, 2, False)] == [(None, "accepted")] * 2

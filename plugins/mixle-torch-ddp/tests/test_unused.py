"""Parameters that some backwards do not use: exact where the first update or the plan says so, else an error on every rank."""

from __future__ import annotations

from contextlib import nullcontext

import attrs
import pytest
import torch
from torch import nn

from mixle_core import LedgerError, MixleError, ParallelPlan, UsageError, attach
from mixle_core.audit import verify
from mixle_core.testing import next_token_loss, token_batch, toy_model

DDP2 = ParallelPlan(dp_replicate=2, timeout_s=5)
WAY_OUT = "ParallelPlan(unused_parameters=True)"


def on_one_rank_in_the_first_backward(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": data_rank == 0 and backward == 0}


def under_no_sync_only(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": backward == 0}


def under_no_sync_only_from_the_second_update_on(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": update == 0 or backward == 0}


def in_the_last_backward_of_one_rank_from_the_second_update_on(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": update == 0 or backward == 0 or data_rank == 1}


def nowhere_in_the_second_update(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "use_branch": update != 1}


def last_block_nowhere_in_the_second_update(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "skip_last": update == 1}


def last_block_on_one_rank_only(update, backward, data_rank):
    return {"ids": token_batch(update, backward, data_rank), "skip_last": data_rank == 1}


def cells(plan, batches, windows):
    return {batch: verify(toy_model, plan, loss=next_token_loss, batch=batch, windows=windows) for batch in batches}


@pytest.fixture
def check(ranks):
    def checked(plan, *batches, windows=None):
        reports = ranks(cells, 2, plan, batches, windows)[0].value
        assert {batch.__name__: report.error for batch, report in reports.items() if not report.passed(1e-5)} == {}
        assert len(reports) == len(batches)

    return checked


def test_use_that_differs_between_backwards_or_ranks_is_exact(check):
    check(
        attrs.evolve(DDP2, gradient_accumulation_steps=2),
        on_one_rank_in_the_first_backward,
        under_no_sync_only,
        under_no_sync_only_from_the_second_update_on,
        in_the_last_backward_of_one_rank_from_the_second_update_on,
        last_block_on_one_rank_only,
        windows=[2, 2, 1, 2],
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_what_no_rank_used_has_no_gradient_and_does_not_decay_when_the_plan_says_so(check, steps):
    plan = attrs.evolve(DDP2, gradient_accumulation_steps=steps, unused_parameters=True)
    check(plan, nowhere_in_the_second_update, last_block_nowhere_in_the_second_update, last_block_on_one_rank_only)


class Stack(nn.Module):
    """Several buckets' worth of layers, the last of which may be left out."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.optional = nn.Linear(width, width)

    def forward(self, values, *, use):
        for layer in self.layers:
            values = layer(values)
        return self.optional(values) if use else values


def surprised(width, bucket_mb, used):
    from mixle_torch_ddp import reduction as plugin

    plugin._BUCKET_MB = bucket_mb
    reduction = attach(Stack(width), DDP2)
    for update in range(4):
        use = update < 3 or used == (reduction.mesh.rank == 0)
        reduction.module(torch.ones(2, width), use=use).sum().backward()
        try:
            reduction.finish(2)
        except MixleError as error:
            return update, type(error), str(error)
        reduction.zero()
    return None


@pytest.mark.parametrize(("width", "bucket_mb"), [(16, 25), (256, 0.25)], ids=["one-bucket", "a-bucket-for-each-layer"])
@pytest.mark.parametrize("used", [True, None], ids=["by-one-rank", "by-no-rank"])
def test_a_parameter_unused_after_it_was_used_everywhere_is_an_error_on_every_rank(ranks, used, width, bucket_mb):
    """DistributedDataParallel alone leaves the other rank waiting, or the next forward broken."""
    outcomes = ranks(surprised, 2, width, bucket_mb, used)
    assert max(outcome.seconds for outcome in outcomes) < 20
    for outcome in outcomes:
        update, kind, text = outcome.value
        assert update == 3
        assert kind in ((LedgerError, UsageError) if used else (LedgerError,))
        assert "optional.weight: not reduced by torch-ddp" in text and "layers" not in text
        assert WAY_OUT in text


def recovers():
    """After such an error, the wrapper itself is whole: the next update reduces as if nothing had been."""
    reduction = attach(Stack(16), DDP2)
    raised = []
    for update in range(4):
        reduction.module(torch.ones(2, 16), use=update != 2).sum().backward()
        try:
            reduced = reduction.finish(2)
        except LedgerError:
            raised.append(update)
        reduction.zero()
    return raised, reduced.skipped


def test_the_update_after_the_error_runs(ranks):
    assert all(outcome.value == ([2], None) for outcome in ranks(recovers, 2))


def forgets():
    """The second update does not use at all what the first used before its last backward."""
    reduction = attach(Stack(16), attrs.evolve(DDP2, gradient_accumulation_steps=2, unused_parameters=False))
    for update in range(2):
        for backward in range(2):
            with reduction.no_sync() if backward == 0 else nullcontext():
                reduction.module(torch.ones(2, 16), use=update == backward == 0).sum().backward()
        try:
            reduction.finish(4)
        except LedgerError as error:
            return update, str(error)
        reduction.zero()
    return None


def test_the_zeros_that_complete_a_bucket_do_not_count_as_use(ranks):
    for outcome in ranks(forgets, 2):
        update, text = outcome.value
        assert update == 1
        assert "optional.weight: not reduced by torch-ddp" in text

"""Owners that misbehave: whatever one of them does wrong on any rank is an error on every rank at that update, in time."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import mixle_core as mx
from mixle_core.testing import OwnsEverything, SumOwner, next_token_loss, run_ranks, token_batch, toy_model

Plan = mx.ParallelPlan
VICTIM, FOREIGN = "norm.weight", "head.weight"


class Faulty(SumOwner):
    """An owner that is right in the first update and wrong in the second, on some ranks."""

    ranks = (0, 1)

    def __init__(self, *args):
        super().__init__(*args)
        self._updates = 0

    @property
    def _wrong(self):
        return self._updates == 2 and dist.get_rank() in self.ranks

    def finish(self, observe):
        self._updates += 1
        return self.spoilt(super().finish(observe)) if self._wrong else super().finish(observe)

    def spoilt(self, result):
        return result


class ReducesTwice(Faulty):
    def spoilt(self, result):
        return mx.OwnerReduction(result.gradients, {**result.counts, VICTIM: 2})


class ReducesTwiceOnOneRank(ReducesTwice):
    ranks = (1,)


class ForgetsToReduce(Faulty):
    def spoilt(self, result):
        return mx.OwnerReduction(result.gradients, {name: n for name, n in result.counts.items() if name != VICTIM})


class CallsUnused(Faulty):
    def spoilt(self, result):
        left = {**result.gradients, VICTIM: mx.Gradient(None, 0.5)}
        return mx.OwnerReduction(left, {name: n for name, n in result.counts.items() if name != VICTIM})


class HandsOverLess(Faulty):
    ranks = (1,)

    def spoilt(self, result):
        return mx.OwnerReduction({name: g for name, g in result.gradients.items() if name != VICTIM}, result.counts)


class HandsOverMore(Faulty):
    def spoilt(self, result):
        return mx.OwnerReduction({**result.gradients, FOREIGN: mx.Gradient(torch.zeros(2), 0.5)}, result.counts)


class CountsAnothers(Faulty):
    def spoilt(self, result):
        return mx.OwnerReduction(result.gradients, {**result.counts, FOREIGN: 1})


class RaisesAfterwards(Faulty):
    ranks = (1,)

    def spoilt(self, result):
        raise ZeroDivisionError("after its collectives")


class RaisesBefore(Faulty):
    ranks = (1,)

    def finish(self, observe):
        if self._updates == 1 and dist.get_rank() == 1:
            raise ZeroDivisionError("before its collectives")
        return super().finish(observe)


class RaisesAtOnce(Faulty):
    def finish(self, observe):
        if dist.get_rank() == 1:
            raise ZeroDivisionError("in the first update")
        return super().finish(observe)


class TwoOwners:
    """The faulty owner has all but the head, which another owns."""

    def __init__(self, faulty):
        self.faulty = faulty

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        claim = partial(mx.Claim, axes={"dp_replicate"}, backend="double")
        rest = [name for name in layouts.trainable if name != FOREIGN]
        right = claim(owner=partial(SumOwner, plan, layouts.transparent), parameters=[FOREIGN])
        return claim(owner=partial(self.faulty, plan, layouts.transparent), parameters=rest), right


def train(kind):
    """Two updates; what happened at each, and what the next call says."""
    reduction = mx.attach(toy_model(), Plan(dp_replicate=2, timeout_s=20), plugins={"two": TwoOwners(globals()[kind])})
    trail = []
    for update in range(2):
        loss, tokens = next_token_loss(reduction.module, token_batch(update, 0, dist.get_rank()))
        loss.backward()
        started = time.monotonic()
        try:
            reduction.finish(tokens)
            trail.append(("fine", "", time.monotonic() - started))
        except Exception as error:  # noqa: BLE001 - the test judges what it is
            trail.append((type(error).__name__, str(error), time.monotonic() - started))
            break
        reduction.zero()
    try:
        reduction.module(token_batch(2, 0, dist.get_rank()))
    except mx.UsageError as error:
        trail.append(("next", str(error), 0.0))
    return trail


ONCE = "update 1: 1 of 22 parameters were not reduced exactly once: norm.weight: "
FAULTS = {
    "ReducesTwice": ONCE + "reduced 2 times by two; way out: run every microbatch but the last inside no_sync()",
    "ReducesTwiceOnOneRank": ONCE + "reduced 2 times by two; way out:",
    "ForgetsToReduce": ONCE + "not reduced by two; way out:",
    "CallsUnused": "two calls norm.weight unused (1 in all), but it has a gradient here",
    "HandsOverLess": "two handed over no gradient for norm.weight (1 in all)",
    "HandsOverMore": "two handed over a gradient it does not own: head.weight (1 in all)",
    "CountsAnothers": "two reduced head.weight, which belongs to two/2",
}


@pytest.mark.parametrize("kind", list(FAULTS))
def test_an_owner_that_does_not_reduce_exactly_what_it_owns_is_an_error_on_all_ranks(kind):
    for rank, outcome in enumerate(run_ranks(train, 2, kind, timeout_s=40)):
        first, second = outcome.value
        everywhere = globals()[kind].ranks == (0, 1)
        assert first[0] == "fine" and second[2] < 10
        assert second[0] == ("LedgerError" if everywhere or rank == 1 else "UsageError")
        assert second[1].startswith(FAULTS[kind] if everywhere or rank == 1 else f"rank 1: {FAULTS[kind]}")


@pytest.mark.parametrize(
    ("kind", "text", "updates"),
    [
        ("RaisesAfterwards", "after its collectives", 1),
        ("RaisesBefore", "before its collectives", 1),
        ("RaisesAtOnce", "in the first update", 0),
    ],
)
def test_an_owner_that_raises_on_one_rank_stops_all_and_none_waits_for_the_timeout(kind, text, updates):
    """The others learn it from the process that ends; the next call on the rank that stopped is refused."""
    outcomes = run_ranks(train, 2, kind, timeout_s=40)
    for rank, outcome in enumerate(outcomes):
        assert [step[0] for step in outcome.value[:updates]] == ["fine"] * updates
        error, said, seconds = outcome.value[updates]
        assert (error, said) == (("ZeroDivisionError", text) if rank == 1 else ("UsageError", f"rank 1: ZeroDivisionError: {text}"))
        assert seconds < 10
        assert outcome.value[-1][1].startswith(f"update {updates} broke off, so the ranks are out of step; start them anew")


def test_after_a_ledger_error_the_same_handle_goes_on_when_its_gradients_are_dropped():
    """A fault that all ranks saw leaves them in step."""
    for outcome in run_ranks(train_on, 2, timeout_s=40):
        assert outcome.value == ["fine", "LedgerError", "fine"]


def train_on():
    reduction = mx.attach(toy_model(), Plan(dp_replicate=2, timeout_s=20), plugins={"two": TwoOwners(ForgetsToReduce)})
    trail = []
    for update in range(3):
        loss, tokens = next_token_loss(reduction.module, token_batch(update, 0, dist.get_rank()))
        loss.backward()
        try:
            assert reduction.finish(tokens).skipped is None
            trail.append("fine")
        except mx.LedgerError as error:
            trail.append(type(error).__name__)
        reduction.zero()
    return trail


def test_an_owner_that_claims_less_than_all_pending_axes_or_alone_what_another_has_is_refused_before_training():
    both = {"two": TwoOwners(ReducesTwice), "double": OwnsEverything()}
    with pytest.raises(mx.OwnershipError, match=r"several for 22 of 22"):
        mx.explain(toy_model(), Plan(dp_replicate=2), plugins=both)
    text = r"two claims blocks\.0\.branch\.bias but does not reduce over its pending axis dp_shard \(pending: dp_replicate, dp_shard\)"
    with pytest.raises(mx.OwnershipError, match=text):
        mx.explain(toy_model(), Plan(dp_replicate=2, dp_shard=2), plugins={"two": TwoOwners(ReducesTwice)})

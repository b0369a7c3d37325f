"""Ranks that differ only in model axes train on the same rows, or fail everywhere; what is no training stays out of the receipt."""

from functools import partial

import torch
import torch.distributed as dist

import mixle_core as mx
from mixle_core.runtime import batch_digest
from mixle_core.testing import next_token_loss, run_ranks, token_batch

Plan = mx.ParallelPlan
adamw = partial(torch.optim.AdamW, lr=1e-3)


def build():
    return mx.load_plugins(required=["qwen3"]).ask_one("qwen3", "build_model", spec="tiny")


def said(function):
    try:
        function()
    except mx.MixleError as error:
        return type(error).__name__, str(error)
    return None


def rows(plan, update, rank=None):
    at = plan.coordinates(dist.get_rank() if rank is None else rank)
    return token_batch(update, 0, at["dp_replicate"] * plan.dp_shard + at["dp_shard"], rows=2)


def odd_batches(odd_update):
    """Four ranks; rank 3, of the second data rank, draws rows of its own in one update; afterwards all go on."""
    plan = Plan(dp_replicate=2, tp=2)
    session = mx.prepare(build(), plan, loss=next_token_loss, optimizer=adamw)
    found = []
    for update in range(3):
        batch = rows(plan, 99 if dist.get_rank() == 3 and update == odd_update else update)
        before = {name: p.detach().clone() for name, p in session.reduction.named_parameters()}
        error = said(lambda batch=batch: session.train_batch(batch))
        changed = any(not torch.equal(before[name], p) for name, p in session.reduction.named_parameters())
        found.append((error, changed))
    return found


ODD = (
    "rank 3 got another batch than rank 2 (other rows of equal number); ranks that differ only in tp train on the same rows: "
    "draw them by the data rank, not by the rank"
)


def test_rows_that_differ_on_one_rank_are_an_error_before_the_first_forward_on_every_rank():
    for outcome in run_ranks(odd_batches, 4, 0, timeout_s=60):
        assert outcome.value == [(("UsageError", f"update 0: {ODD}"), False), (None, True), (None, True)]


def test_rows_that_differ_later_are_an_error_of_that_update_on_every_rank_and_change_nothing():
    for outcome in run_ranks(odd_batches, 4, 2, timeout_s=60):
        assert outcome.value == [(None, True), (None, True), (("UsageError", f"update 2: {ODD}"), False)]


def own_loop_with_odd_counts():
    reduction = mx.attach(build(), Plan(tp=2))
    loss, tokens = next_token_loss(reduction.module, rows(Plan(tp=2), 0))
    loss.backward()
    return said(lambda: reduction.finish(tokens + dist.get_rank()))


def test_token_counts_that_differ_within_a_data_rank_are_an_error_in_an_own_loop():
    tokens = next_token_loss(lambda ids: torch.zeros(*ids.shape, 256), token_batch(0, 0, 0, rows=2))[1]
    for outcome in run_ranks(own_loop_with_odd_counts, 2, timeout_s=60):
        kind, text = outcome.value
        assert kind == "UsageError"
        assert text.startswith(f"update 0: rank 1 got another batch than rank 0 ({tokens + 1} loss tokens against {tokens});")


def evaluation_between_updates(evaluate):
    session = mx.prepare(build(), Plan(dp_shard=2), loss=next_token_loss, optimizer=adamw)
    receipts = []
    for update in range(3):
        receipts.append(session.train_batch(rows(Plan(dp_shard=2), update)))
        if evaluate:
            session.evaluate([rows(Plan(dp_shard=2), 50)])
    return [receipt.owners for receipt in receipts]


def test_an_evaluation_between_updates_does_not_count_in_their_receipts():
    plain = run_ranks(evaluation_between_updates, 2, False, timeout_s=60)[0].value
    assert plain[1][0].num_collectives > 0
    assert run_ranks(evaluation_between_updates, 2, True, timeout_s=60)[0].value == plain


def test_a_digest_sees_values_shapes_and_types_in_any_container():
    base = torch.arange(6)
    assert batch_digest({"a": base}) == batch_digest([base.clone()])
    others = [base.view(2, 3), base.float(), base.flip(0), torch.arange(7), torch.zeros(()), torch.zeros(0)]
    assert len({batch_digest(other) for other in [base, *others]}) == 1 + len(others)
    assert batch_digest(base, batch_digest(base)) != batch_digest(base)

"""Ranks that differ only in model axes train on the same rows, or fail everywhere; what is no training stays out of the receipt."""

from functools import partial

import pytest
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


def mirrored():
    """Both data ranks have one wrong rank, in mirror image: [A, B, B, A] for ranks that should have [A, A, B, B]."""
    plan = Plan(dp_replicate=2, tp=2)
    session = mx.prepare(build(), plan, loss=next_token_loss, optimizer=adamw)
    session.train_batch(rows(plan, 0))
    return said(lambda: session.train_batch(rows(plan, 1, rank=(0, 2, 2, 0)[dist.get_rank()])))


def test_two_faults_in_mirror_image_do_not_cancel():
    for outcome in run_ranks(mirrored, 4, timeout_s=60):
        assert outcome.value[0] == "UsageError"
        assert outcome.value[1].startswith("update 1: rank 1 got another batch than rank 0 (other rows of equal number)")


def unlike_sessions(change):
    options = {"optimizer": adamw, "max_grad_norm": 1.0}
    if dist.get_rank() == 1:
        options.update({"lr": {"optimizer": partial(torch.optim.AdamW, lr=1e-2)}, "norm": {"max_grad_norm": 0.5}}[change])
    return said(lambda: mx.prepare(build(), Plan(dp_replicate=2), loss=next_token_loss, **options))


@pytest.mark.parametrize(
    ("change", "text"),
    [("norm", "session: max_grad_norm is 0.5 on rank 1 and 1.0 on rank 0; pass the same"), ("lr", "session: optimizer ** is ('AdamW', ")],
)
def test_sessions_that_would_drift_apart_are_refused_on_every_rank(change, text):
    for outcome in run_ranks(unlike_sessions, 2, change, timeout_s=60):
        assert outcome.value[0] == "UsageError"
        assert outcome.value[1].startswith(text)


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


def failing_and_nested_evaluations():
    plan = Plan(dp_shard=2)
    session = mx.prepare(build(), plan, loss=next_token_loss, optimizer=adamw)
    receipts = [session.train_batch(rows(plan, 0)), session.train_batch(rows(plan, 1))]
    with session.evaluating():
        session.evaluate([rows(plan, 50)])
    receipts.append(session.train_batch(rows(plan, 2)))

    def broken(module, ids):
        next_token_loss(module, ids)
        raise OSError("in the loss")

    try:
        session.evaluate([rows(plan, 51)], loss=broken)
    except OSError:
        receipts.append(session.train_batch(rows(plan, 3)))
    return [receipt.owners for receipt in receipts]


def test_evaluations_inside_one_another_or_that_fail_do_not_count_either():
    plain = run_ranks(evaluation_between_updates, 2, False, timeout_s=60)[0].value
    assert run_ranks(failing_and_nested_evaluations, 2, timeout_s=60)[0].value[1:] == [plain[1]] * 3


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
    assert batch_digest((base,)) == batch_digest([base.clone()])
    late = torch.zeros(2**18, dtype=torch.int64)
    changed = late.clone()
    changed[-1] = 1
    assert batch_digest(late) != batch_digest(changed)
    assert batch_digest({"a": base}) != batch_digest({"b": base})
    assert batch_digest({"a": base, 1: late}) == batch_digest({1: late, "a": base})
    assert batch_digest({"in": {"a": base}}) != batch_digest({"in": {"b": base}})
    assert batch_digest([base, 1]) != batch_digest([base, 2])
    others = [base.view(2, 3), base.float(), base.flip(0), torch.arange(7), torch.zeros(()), torch.zeros(0)]
    assert len({batch_digest(other) for other in [base, *others]}) == 1 + len(others)
    assert batch_digest(base, batch_digest(base)) != batch_digest(base)


def one_rank_without_an_optimizer():
    optimizer = adamw if dist.get_rank() == 0 else {"nothing.*": adamw}
    return said(lambda: mx.prepare(build(), Plan(dp_replicate=2), loss=next_token_loss, optimizer=optimizer))


def test_a_rank_that_cannot_make_its_optimizer_fails_all():
    other, own = (outcome.value for outcome in run_ranks(one_rank_without_an_optimizer, 2, timeout_s=20))
    assert own == ("UsageError", "optimizer pattern 'nothing.*' routes no trainable parameter")
    assert other == ("UsageError", f"rank 1: {own[1]}")

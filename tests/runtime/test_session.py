"""The session against a hand-written loop of one process: windows, token counts, losses, clipping, schedule, routes."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import mixle_core as mx
from mixle_core.audit import reference_model, relative_error
from mixle_core.testing import OwnsEverything, SumOwner, next_token_loss, run_ranks, token_batch, toy_model

Plan = mx.ParallelPlan
CLIP, SEED = 0.5, 3
adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, weight_decay=0.1)


def halving(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def ids_for(mask, number, rank):
    """Four rows; PAD cuts the rank's rows by what `mask` says."""
    ids = token_batch(number, 0, rank, rows=4)
    length = {"even": 8, "uneven": 3 + 2 * rank + number, "none on rank 1": 8 if rank == 0 else 0}[mask]
    ids[:, length:] = 0
    return ids


def session_on_rank(mask, num_batches):
    plan = Plan(dp_replicate=2, microbatches=2, gradient_accumulation_steps=2)
    model = toy_model()
    session = mx.prepare(
        model,
        plan,
        loss=next_token_loss,
        optimizer=adamw,
        schedule=halving,
        max_grad_norm=CLIP,
        seed=SEED,
        plugins={"double": OwnsEverything()},
    )
    rank = dist.get_rank()
    receipts = [session.train_batch(ids_for(mask, number, rank)) for number in range(num_batches)]
    receipts.append(session.finish_accumulation())
    assert session.finish_accumulation() is None
    score = session.evaluate([ids_for(mask, 7, rank), ids_for(mask, 8, rank)])
    return receipts, {name: p.detach() for name, p in session.reduction.named_parameters()}, score, session.update


def by_hand(model, windows, optimizer=adamw, schedule=halving, clip=CLIP):
    """One process on all rows of each window at once; what each update had."""
    built = optimizer(model.parameters())
    scheduler = schedule(built)
    seen = []
    for batches in windows:
        total, tokens = 0.0, 0
        for ids in batches:
            loss, count = next_token_loss(model, ids)
            loss.backward()
            total, tokens = total + float(loss.detach()), tokens + count
        for parameter in model.parameters():
            parameter.grad.mul_(1.0 / tokens)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), clip)) if clip else 0.0
        seen.append({"loss": total / tokens, "num_tokens": tokens, "grad_norm": norm, "learning_rate": built.param_groups[0]["lr"]})
        built.step()
        scheduler.step()
        built.zero_grad()
    return seen


@pytest.mark.parametrize("mask", ["even", "uneven", "none on rank 1"])
def test_two_full_windows_and_a_trailing_one_equal_a_hand_written_loop(mask):
    outcomes = run_ranks(session_on_rank, 2, mask, 5, timeout_s=60)
    reference = reference_model(toy_model, SEED)
    batches = [[ids_for(mask, number, rank) for rank in range(2)] for number in range(5)]
    expected = by_hand(reference, [batches[0] + batches[1], batches[2] + batches[3], batches[4]])
    assert any(update["grad_norm"] > CLIP for update in expected)
    for outcome in outcomes:
        receipts, parameters, _, updates = outcome.value
        committed = [receipts[1], receipts[3], receipts[5]]
        assert updates == 3
        assert [receipt.update for receipt in receipts] == [0, 0, 1, 1, 2, 2]
        for receipt, wanted in zip(committed, expected, strict=True):
            assert receipt.committed and receipt.skipped is None
            assert receipt.num_tokens == wanted["num_tokens"]
            assert receipt.learning_rate == wanted["learning_rate"]
            assert receipt.loss == pytest.approx(wanted["loss"], rel=1e-5)
            assert receipt.grad_norm == pytest.approx(wanted["grad_norm"], rel=1e-5)
            assert receipt.clip_factor == pytest.approx(min(1.0, CLIP / wanted["grad_norm"]), rel=1e-5)
        worst = max((relative_error(parameters[name], p.detach()), name) for name, p in reference.named_parameters())
        assert worst[0] < 1e-5, worst


@pytest.mark.parametrize("mask", ["uneven", "none on rank 1"])
def test_only_the_last_receipt_of_a_window_is_committed_and_each_tells_its_own_rows(mask):
    for outcome in run_ranks(session_on_rank, 2, mask, 3, timeout_s=60):
        receipts = outcome.value[0]
        ids = ids_for(mask, 0, outcome.rank)
        loss, tokens = next_token_loss(reference_model(toy_model, SEED), ids)
        first = receipts[0]
        assert [receipt.committed for receipt in receipts] == [False, True, False, True]
        assert first.loss == pytest.approx(float(loss.detach()) / max(tokens, 1), rel=1e-5)
        assert (first.num_local_tokens, first.num_local_examples, first.microbatches) == (tokens, 4, 2)
        assert first.num_tokens is first.grad_norm is first.clip_factor is first.learning_rate is None and first.owners == ()
        counts = [[next_token_loss(reference_model(toy_model, SEED), ids_for(mask, n, rank))[1] for rank in range(2)] for n in range(3)]
        full, trailing = receipts[1], receipts[3]
        assert (full.num_local_tokens, full.num_local_examples, full.microbatches, full.accumulation) == (counts[1][outcome.rank], 4, 2, 2)
        assert (full.num_update_local_tokens, full.num_update_local_examples) == (sum(c[outcome.rank] for c in counts[:2]), 8)
        assert (full.num_tokens, full.num_examples) == (sum(map(sum, counts[:2])), 16)
        assert (trailing.num_local_tokens, trailing.num_local_examples, trailing.microbatches) == (0, 0, 0)
        assert (trailing.num_update_local_tokens, trailing.num_update_local_examples) == (counts[2][outcome.rank], 4)
        assert (trailing.num_tokens, trailing.num_examples, trailing.accumulation) == (sum(counts[2]), 8, 1)


def test_the_receipt_of_an_update_says_what_each_owner_did():
    receipt = run_ranks(session_on_rank, 2, "even", 2, timeout_s=60)[0].value[0][1]
    model = toy_model()
    (owner,) = receipt.owners
    assert (owner.owner, owner.num_parameters, owner.num_collectives) == ("double", len(list(model.parameters())), 1)
    assert owner.payload_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_evaluate_is_the_mean_over_the_tokens_of_all_ranks():
    outcomes = run_ranks(session_on_rank, 2, "uneven", 1, timeout_s=60)
    reference = reference_model(toy_model, SEED)
    by_hand(reference, [[ids_for("uneven", 0, rank) for rank in range(2)]])
    sums = [next_token_loss(reference, ids_for("uneven", number, rank)) for number in (7, 8) for rank in range(2)]
    wanted = sum(float(loss.detach()) for loss, _ in sums) / sum(count for _, count in sums)
    assert [outcome.value[2] for outcome in outcomes] == pytest.approx([wanted, wanted], rel=1e-5)


class Watches(SumOwner):
    """Notes for each forward whether it runs inside `no_sync()`."""

    inside = False

    def install(self, model, rows, mesh):
        model.trail = []
        model.register_forward_pre_hook(lambda module, args: module.trail.append(self.inside))
        return super().install(model, rows, mesh)

    @contextmanager
    def no_sync(self):
        self.inside = True
        yield
        self.inside = False


class OwnsWatching(OwnsEverything):
    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        return mx.Claim(owner=lambda: Watches(plan, ()), parameters=layouts.trainable, axes={"dp_replicate"}, backend="double")


def watched_session():
    plan = Plan(dp_replicate=2, microbatches=2, gradient_accumulation_steps=2)
    session = mx.prepare(toy_model(), plan, loss=next_token_loss, optimizer=adamw, plugins={"double": OwnsWatching()})
    for number in range(3):
        session.train_batch(ids_for("even", number, dist.get_rank()))
    session.finish_accumulation()
    return session.reduction.model.trail


def test_all_microbatches_but_the_last_of_a_full_window_run_inside_no_sync():
    for outcome in run_ranks(watched_session, 2, timeout_s=60):
        assert outcome.value == [True, True, True, False, True, True]


def one_process(loss=next_token_loss, optimizer=adamw, **options):
    model = toy_model()
    plan = options.pop("plan", Plan())
    return mx.prepare(model, plan, loss=loss, optimizer=optimizer, seed=SEED, plugins={}, **options)


def values(session):
    return {name: parameter.detach().clone() for name, parameter in session.reduction.named_parameters()}


def test_evaluate_changes_nothing_and_leaves_modules_in_the_mode_they_were_in():
    session = one_process()
    session.module.blocks[0].eval()
    before, modes = values(session), [module.training for module in session.module.modules()]
    session.evaluate([token_batch(0, 0, 0)])
    assert [module.training for module in session.module.modules()] == modes
    assert all(torch.equal(before[name], value) for name, value in values(session).items())
    assert session.update == 0 and all(p.grad is None for p in session.module.parameters())
    with pytest.raises(mx.UsageError, match="evaluate: no batch had a loss token on any rank"):
        session.evaluate([torch.zeros(2, 4, dtype=torch.long)])


def test_one_process_needs_no_process_group_and_the_loss_scale_changes_no_digit():
    """The scale is a power of two, so the results are those of the loop without it, to the bit."""
    scales = []

    def watched(module, ids):
        loss, count = next_token_loss(module, ids)
        loss.register_hook(lambda gradient: scales.append(float(gradient)))
        return loss, count

    session = one_process(loss=watched, schedule=halving)
    batches = [ids_for("uneven", number, 0) for number in range(3)]
    receipts = [session.train_batch(ids) for ids in batches]
    reference = reference_model(toy_model, SEED)
    by_hand(reference, [[ids] for ids in batches], clip=None)
    assert not dist.is_initialized()
    assert scales[0] == 1.0 and all(scale < 0.5 and torch.frexp(torch.tensor(scale)).mantissa == 0.5 for scale in scales[1:])
    assert [owner.owner for owner in receipts[0].owners] == ["local"]
    for name, parameter in reference.named_parameters():
        assert torch.equal(values(session)[name], parameter.detach()), name


def test_routes_give_each_pattern_its_optimizer():
    routes = {"**.weight": partial(torch.optim.SGD, lr=0.1), "**.bias": partial(torch.optim.SGD, lr=0.3)}
    session = one_process(optimizer=routes)
    before = values(session)
    receipt = session.train_batch(token_batch(0, 0, 0))
    reference = reference_model(toy_model, SEED)
    loss, tokens = next_token_loss(reference, token_batch(0, 0, 0))
    loss.backward()
    for name, parameter in reference.named_parameters():
        rate = 0.1 if name.endswith("weight") else 0.3
        assert relative_error(values(session)[name], before[name] - rate * parameter.grad / tokens) < 1e-6, name
    assert receipt.learning_rate == 0.1 and list(session.optimizers) == list(routes)


def test_a_skipped_update_changes_nothing_and_the_next_one_is_exact():
    poison = {"on": False}

    def loss(module, ids):
        value, count = next_token_loss(module, ids)
        return (value + module.norm.weight.sum() * float("nan") if poison["on"] else value), count

    session = one_process(loss=loss, schedule=halving, max_grad_norm=CLIP)
    session.train_batch(token_batch(0, 0, 0))
    before, state = values(session), repr(session.optimizers["**"].state_dict())
    poison["on"] = True
    skipped = session.train_batch(token_batch(1, 0, 0))
    assert skipped.committed and skipped.skipped == "non-finite gradient: norm.weight" and skipped.clip_factor == 1.0
    assert all(torch.equal(before[name], value) for name, value in values(session).items())
    assert repr(session.optimizers["**"].state_dict()) == state and session.schedulers["**"].last_epoch == 1
    assert (session.num_skipped, session.update) == (1, 2)
    poison["on"] = False
    session.train_batch(token_batch(2, 0, 0))
    reference = reference_model(toy_model, SEED)
    by_hand(reference, [[token_batch(0, 0, 0)], [token_batch(2, 0, 0)]])
    for name, parameter in reference.named_parameters():
        assert relative_error(values(session)[name], parameter.detach()) < 1e-6, name


def test_a_batch_that_fails_halfway_leaves_no_gradient_in_the_next_window():
    calls = []

    def loss(module, ids):
        calls.append(len(calls))
        if calls[-1] == 1:
            raise MemoryError("second microbatch")
        return next_token_loss(module, ids)

    session = one_process(loss=loss, plan=Plan(microbatches=2), schedule=halving, max_grad_norm=CLIP)
    with pytest.raises(MemoryError):
        session.train_batch(token_batch(0, 0, 0))
    assert session.finish_accumulation() is None
    assert session.train_batch(token_batch(1, 0, 0)).committed
    reference = reference_model(toy_model, SEED)
    by_hand(reference, [[token_batch(1, 0, 0)]])
    for name, parameter in reference.named_parameters():
        assert relative_error(values(session)[name], parameter.detach()) < 1e-6, name

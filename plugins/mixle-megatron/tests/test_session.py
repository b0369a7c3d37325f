"""A session over Megatron's schedule, buffers and optimizers: its receipts are those of one process."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mixle_core as mx
from mixle_core.audit.compare import relative_error
from mixle_core.runtime import attach, solo_group
from mixle_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from models import LENGTH, VOCAB, batch, model, next_token_loss, plugins

Plan = mx.ParallelPlan

ADAMW = partial(torch.optim.AdamW, lr=3e-4, eps=1e-6, weight_decay=0.1)
WINDOW = {"gradient_accumulation_steps": 2, "microbatches": 2}
PLANS = {
    "pp2xtp2": ("tiny", Plan(pp=2, tp=2, **WINDOW)),
    "dp2xpp2-sharded": ("tiny-tied", Plan(dp_shard=2, pp=2, **WINDOW)),
    "ep2": ("tiny-moe", Plan(dp_replicate=2, ep=2, **WINDOW)),
}
BATCHES = 2 * 3 + 1
"""Three full windows, and one that ends early."""


def rows(number: int, data_rank: int) -> torch.Tensor:
    """One batch of one data rank, with a row for each microbatch."""
    return batch(number, 0, data_rank)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5**update)


def session_of(size: str, plan: mx.ParallelPlan, *, build: Any = None, optimizer: Any = ADAMW, **options: Any) -> Any:
    settings = {"loss": next_token_loss, "optimizer": optimizer, "seed": 0, "plugins": plugins(), **options}
    return mx.prepare((build or model(size))(), plan, backend="megatron" if plan.world_size > 1 else None, **settings)


def data_rank_of(session: Any) -> int:
    at = session.reduction.mesh.coordinates
    return at["dp_replicate"] * session.plan.dp_shard + at["dp_shard"]


def trained(size: str, plan: mx.ParallelPlan, data_size: int) -> tuple[list[Any], float]:
    """(receipts of updates, held-out loss): with one process, on the rows of all data ranks."""
    solo_group("test")  # see below: a model that is built before any process group exists cannot run in one process
    session = session_of(size, plan, schedule=halving, max_grad_norm=0.1)
    mine = [data_rank_of(session)] if plan.data_size > 1 else list(range(data_size))
    receipts = [session.train_batch(torch.cat([rows(number, rank) for rank in mine])) for number in range(BATCHES)]
    receipts.append(session.finish_accumulation())
    held_out = session.evaluate([torch.cat([rows(100 + i, rank) for rank in mine]) for i in range(2)])
    session.close()
    return [receipt for receipt in receipts if receipt.committed], held_out


@pytest.mark.parametrize("name", PLANS)
def test_receipts_and_evaluation_are_those_of_one_process(name):
    size, plan = PLANS[name]
    alone = Plan(**{**WINDOW, "microbatches": 2 * plan.data_size})  # the same rows in each microbatch
    ((wanted, wanted_held_out),) = [outcome.value for outcome in run_ranks(trained, 1, size, alone, plan.data_size)]
    assert len(wanted) == 4
    assert wanted[0].learning_rate == 3e-4 and wanted[3].learning_rate == 3e-4 / 8
    assert all(receipt.clip_factor < 0.9 for receipt in wanted)
    for rank, outcome in enumerate(run_ranks(trained, plan.world_size, size, plan, plan.data_size, reuse=True)):
        receipts, held_out = outcome.value
        assert held_out == pytest.approx(wanted_held_out, rel=1e-5)
        for mine, theirs in zip(receipts, wanted, strict=True):
            for field in ("loss", "grad_norm", "clip_factor", "learning_rate"):
                assert getattr(mine, field) == pytest.approx(getattr(theirs, field), rel=1e-5), (rank, field, mine)
            for field in ("num_tokens", "num_examples", "update", "skipped", "accumulation"):
                assert getattr(mine, field) == getattr(theirs, field), (rank, field, mine)
        assert [receipt.accumulation for receipt in receipts] == [2, 2, 2, 1]
        (owner,) = receipts[1].owners
        assert owner.owner == "megatron" and owner.num_parameters > 0
        assert owner.num_collectives > 0 or plan.data_size == 1
        assert (owner.payload_bytes > 0) == (owner.num_collectives > 0)


def trained_alone() -> float:
    session = session_of("tiny", Plan())
    return session.train_batch(rows(0, 0)).loss


def test_a_model_trains_in_one_process_that_no_process_group_exists_in():
    (outcome,) = run_ranks(trained_alone, 1)
    assert outcome.value > 0


def traffic(size: str, plan: mx.ParallelPlan) -> tuple[list[tuple[int, int]], int, int]:
    """((collectives, bytes) of each update after the first, elements this rank holds, left out by the finaliser)."""
    session = session_of(size, plan)
    receipts = [session.train_batch(rows(number, data_rank_of(session))) for number in range(3)]
    elements = sum(p.numel() for _, p in session.reduction.named_parameters())
    left_out = len(session.reduction._owners["megatron"]._left_out)
    session.close()
    return [(r.owners[0].num_collectives, r.owners[0].payload_bytes) for r in receipts], elements, left_out


@pytest.mark.parametrize(
    ("size", "plan", "collectives"),
    [
        ("tiny", Plan(dp_replicate=2, microbatches=2), 1),
        ("tiny", Plan(tp=2, microbatches=2), 1),
        ("tiny-moe", Plan(dp_replicate=2, ep=2), 1),
    ],
    ids=["dp2: one all-reduce of the buffer", "tp2: one of the q/k norms", "ep2: one of the dense part"],
)
def test_the_receipt_counts_megatrons_collectives_and_their_bytes(size, plan, collectives):
    for outcome in run_ranks(traffic, 2, size, plan, reuse=True):
        updates, elements, left_out = outcome.value
        assert left_out == 0
        assert updates[0] == updates[1] == updates[2]
        assert updates[0][0] == collectives
        if plan == Plan(dp_replicate=2, microbatches=2):
            assert 4 * elements <= updates[0][1] <= 4 * elements * 1.05  # the buffer is padded


# ------------------------------------------------------------------------------------------------- executed once


def reduced_twice(plan: mx.ParallelPlan) -> None:
    session = session_of("tiny", plan)
    owner = session.reduction._owners["megatron"]
    session.train_batch(rows(0, data_rank_of(session)))
    run = session.reduction.run

    def and_once_more(*args: Any, **kwargs: Any) -> Any:
        done = run(*args, **kwargs)
        for group in owner._ddp.bucket_groups:
            group.start_grad_sync()
        return done

    session.reduction.run = and_once_more
    session.train_batch(rows(1, data_rank_of(session)))


@pytest.mark.parametrize("plan", [Plan(dp_replicate=2), Plan(dp_shard=2), Plan(tp=2)], ids=["dp2", "dp2-sharded", "tp2"])
def test_a_second_reduction_in_an_update_is_an_error_that_counts_it(plan):
    for outcome in run_ranks(reduced_twice, 2, plan, check=False):
        assert outcome.error == "LedgerError", outcome.trace
        assert "update 1: " in outcome.message and "reduced 2 times by megatron" in outcome.message


def never_reduced() -> None:
    session = session_of("tiny", Plan(dp_replicate=2))
    session.reduction._owners["megatron"]._finalise = lambda: None
    session.train_batch(rows(0, data_rank_of(session)))


def test_an_update_that_is_not_reduced_is_an_error():
    for outcome in run_ranks(never_reduced, 2, check=False):
        assert outcome.error == "LedgerError", outcome.trace
        assert "not reduced by megatron" in outcome.message


# --------------------------------------------------------------------------------------------- unused parameters

IDLE = "decoder.idle"


def with_an_idle_parameter() -> nn.Module:
    """A GPT with a parameter on the decoder that no forward uses, at 1."""
    shell = model("tiny")()
    inner = shell.provider

    def provider(**arguments: Any) -> Any:
        part = inner(**arguments)
        idle = torch.empty(8)
        idle.mixle_init = nn.init.ones_
        part.decoder.idle = nn.Parameter(idle)
        part.decoder.idle.mixle_init = nn.init.ones_
        return part

    from mixle_megatron import MegatronModel

    return MegatronModel(shell.base_config, provider)


def idle_after(plan: mx.ParallelPlan) -> tuple[list[float], float, list[str | None]]:
    """(the idle parameter after three updates, largest change of the others relative to one process, why steps were skipped)."""
    session = session_of("", plan, build=with_an_idle_parameter)
    skipped = [session.train_batch(rows(number, data_rank_of(session))).skipped for number in range(3)]
    found = {name: parameter.detach().clone() for name, parameter in session.reduction.named_parameters()}
    session.close()
    from mixle_core.audit.verification import reference_model
    from mixle_core.runtime import logical_parameters

    reference = reference_model(with_an_idle_parameter, 0, session.reduction)
    theirs = logical_parameters(reference)
    optimizer = ADAMW(theirs.values())
    for number in range(3):
        tokens = 0
        for data_rank in range(plan.data_size):
            loss, count = next_token_loss(reference, rows(number, data_rank))
            loss.backward()
            tokens += count
        for parameter in theirs.values():
            if parameter.grad is not None:
                parameter.grad /= tokens
        optimizer.step()
        optimizer.zero_grad()
    return found[IDLE].tolist(), max(relative_error(found[name], theirs[name].detach()) for name in found), skipped


@pytest.mark.parametrize("plan", [Plan(dp_replicate=2), Plan(dp_shard=2)], ids=["dp2", "dp2-sharded"])
def test_a_parameter_that_nobody_uses_stays_as_it_is_under_weight_decay(plan):
    for outcome in run_ranks(idle_after, 2, plan):
        idle, error, skipped = outcome.value
        assert idle == [1.0] * 8
        assert error < 1e-5
        assert skipped == [None] * 3


# ----------------------------------------------------------------------------------------------------- not finite


def nan_on_one_rank(plan: mx.ParallelPlan, rank: int) -> tuple[str, int, float, str | None]:
    def loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        value, count = next_token_loss(module, ids)
        bad = poisoned and session.reduction.mesh.rank == rank
        return value * float("nan") if bad else value, count

    poisoned = False
    session = session_of("tiny", plan, loss=loss)
    before = {name: parameter.detach().clone() for name, parameter in session.reduction.named_parameters()}
    poisoned = True
    receipt = session.train_batch(rows(0, data_rank_of(session)))
    changed = max(float((p.detach() - before[name]).abs().max()) for name, p in session.reduction.named_parameters())
    poisoned = False
    after = session.train_batch(rows(1, data_rank_of(session)))
    assert any(not torch.equal(p.detach(), before[name]) for name, p in session.reduction.named_parameters())
    return receipt.skipped, session.num_skipped, changed, after.skipped


@pytest.mark.parametrize(
    ("plan", "rank"), [(Plan(dp_replicate=2), 1), (Plan(dp_shard=2), 0), (Plan(pp=2), 1)], ids=["dp2", "dp2-sharded", "pp2"]
)
def test_one_ranks_loss_that_is_no_number_skips_the_step_everywhere(plan, rank):
    for outcome in run_ranks(nan_on_one_rank, 2, plan, rank, reuse=True):
        skipped, number, changed, after = outcome.value
        assert skipped.startswith("non-finite gradient: ")
        assert (number, changed, after) == (1, 0.0, None)


# --------------------------------------------------------------------------------------------- the way to the CPU


def redirected() -> tuple[int, list[Any]]:
    """How often it was said that Megatron runs on the CPU, for two models and an attach."""
    import structlog
    from mixle_megatron import _upstream

    with structlog.testing.capture_logs() as logs:
        _upstream._redirected.clear()
        _upstream.log = structlog.get_logger("mixle_megatron._upstream")
        model("tiny")()
        attach(model("tiny")(), Plan(tp=2), backend="megatron", seed=0, plugins=plugins()).close()
    return len([entry for entry in logs if entry["event"] == "megatron_on_cpu"]), [entry["log_level"] for entry in logs]


def test_the_way_to_the_cpu_is_said_once():
    for outcome in run_ranks(redirected, 2):
        assert outcome.value == (1, ["warning"])


def redirected_beside_cuda() -> tuple[str, bool, bool]:
    from mixle_megatron import _upstream

    _upstream._redirected.clear()
    torch.cuda.is_available = lambda: True
    stream = torch.cuda.Stream
    with pytest.raises(mx.CapabilityError) as refused:
        _upstream.use_cpu()
    return str(refused.value), torch.cuda.Stream is stream, bool(_upstream._redirected)


def test_nothing_is_redirected_where_there_is_cuda():
    (outcome,) = run_ranks(redirected_beside_cuda, 1)
    text, untouched, installed = outcome.value
    assert "Megatron-Core runs on the CPU only where no CUDA is available; pass device='cuda', or hide the GPUs" in text
    assert untouched and not installed


def test_rows_are_those_that_the_comparison_needs():
    """Data ranks have different numbers of tokens, or the denominators would not be tested."""
    counts = [int((rows(0, rank)[:, 1:] >= 0).sum()) for rank in (0, 1)]
    assert counts[0] != counts[1]
    assert rows(0, 0).shape == (2, LENGTH) and int(rows(0, 0).max()) < VOCAB


BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}


def attached_again() -> list[float]:
    """Norms of one update, of a model that ran by itself before it was attached, twice."""
    torch.set_num_threads(1)
    net = model("tiny-moe", **BALANCED)()
    norms = []
    for scale in (1.0, 2.0**-6):
        reduction = mx.attach(net, Plan(dp_replicate=2), backend="megatron", plugins=plugins(), seed=0)
        loss, tokens = reduction.run([batch(0, 0, reduction.mesh.rank)], next_token_loss, loss_scale=scale)
        norms.append(reduction.finish(tokens, float(loss), loss_scale=scale).norm())
        reduction.zero()
        reduction.close()
        with torch.no_grad():
            net(batch(0, 0, 0).clamp_min(0))
    return norms


def test_a_model_is_attached_again_and_its_inner_losses_follow_the_scale():
    for outcome in run_ranks(attached_again, 2, reuse=True):
        first, second = outcome.value
        assert second == pytest.approx(first, rel=1e-5)

"""G1, G3, G4, N1: ranks that die, stop, fail or leave within an update; the time limit of every process group; counters after a resume."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import toys

import mixle_core as mx
from mixle_core.testing import run_ranks

Plan = mx.ParallelPlan
ALL = int(os.environ.get("MIXLE_FAULTS", "0")) >= 50
TIMEOUT_S = 6.0
PLANS = {
    "ddp2": Plan(dp_replicate=2, timeout_s=TIMEOUT_S),
    "fsdp2": Plan(dp_shard=2, timeout_s=TIMEOUT_S),
    "tp2": Plan(tp=2, timeout_s=TIMEOUT_S),
    "fsdp2 x tp2": Plan(dp_shard=2, tp=2, timeout_s=TIMEOUT_S),
}


# ---- G1 --------------------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("planted")


def leave() -> None:
    os._exit(0)


HOW = {"killed": die, "stopped": stop, "raises": fail, "exits with 0": leave}
WHERE = ("forward", "backward", "reduce", "clip", "step")


def arm(session: mx.Session, where: str, strike) -> None:
    """Let something happen to this process within its next update."""
    reduction = session.reduction
    block = reduction.model.blocks[0]
    if where == "forward":
        block.register_forward_pre_hook(lambda module, args: strike())
    elif where == "backward":
        block.register_forward_hook(lambda module, args, output: output.register_hook(lambda gradient: strike()) and None)
    elif where == "reduce":
        real = reduction.mesh.all_reduce_control
        reduction.mesh.all_reduce_control = lambda *args, **options: (strike(), real(*args, **options))[1]
    elif where == "clip":
        finish = reduction.finish
        reduction.finish = lambda *args, **options: (finish(*args, **options), strike())[0]
    else:
        session.optimizers["**"].register_step_pre_hook(lambda *_: strike())


def struck(name: str, where: str, how: str):
    """Trains; the last rank is struck in the second update. The others raise, and say after how long."""
    plan = PLANS[name]
    session = toys.make(plan)
    session.train_batch(toys.rows(plan, 0))
    pids = [0] * plan.world_size
    dist.all_gather_object(pids, os.getpid())
    victim = dist.get_rank() == plan.world_size - 1
    if victim:
        arm(session, where, HOW[how])
    dist.barrier()
    started = time.monotonic()
    try:
        for update in range(1, 200):
            session.train_batch(toys.rows(plan, update))
    except BaseException as error:
        seconds = time.monotonic() - started
        if not victim:
            time.sleep(TIMEOUT_S + 1.0 if how == "stopped" else 0.0)  # until the others are done, too
            os.kill(pids[-1], signal.SIGCONT) if how == "stopped" else None
        raise SystemExit(f"{seconds:.2f}|{type(error).__name__}|{error}") from error


FEW = [
    ("ddp2", "forward", "killed"),
    ("fsdp2", "backward", "stopped"),
    ("tp2", "backward", "killed"),
    ("tp2", "reduce", "raises"),
    ("fsdp2", "reduce", "exits with 0"),
    ("fsdp2 x tp2", "clip", "exits with 0"),
    ("ddp2", "step", "raises"),
]
CASES = [(name, where, how) for where in WHERE for name in PLANS for how in HOW] if ALL else FEW


@pytest.mark.parametrize(("name", "where", "how"), CASES)
def test_g1_a_rank_that_is_gone_ends_the_others_within_the_timeout(name, where, how):
    outcomes = run_ranks(struck, PLANS[name].world_size, name, where, how, check=False, timeout_s=60)
    victim = outcomes[-1]
    assert victim.exitcode == {"killed": -signal.SIGKILL, "exits with 0": 0}.get(how, 1)
    for outcome in outcomes[:-1]:
        assert outcome.exitcode == 1 and outcome.error == "SystemExit", outcome
        seconds, _, text = outcome.message.split("|", 2)
        assert float(seconds) < TIMEOUT_S + 5.0, outcome.message
        if how == "raises" and where == "reduce":
            assert text == f"rank {victim.rank}: RuntimeError: planted"


# ---- G3 --------------------------------------------------------------------------------------------------------------


def out_of_step(name: str, what: str):
    """The ranks do different things in the second update: what each hears, and after how long."""
    plan, rank = PLANS[name], dist.get_rank()
    session = toys.make(plan)
    session.train_batch({"ids": toys.rows(plan, 0), "use_branch": True})
    before = {key: parameter.detach().clone() for key, parameter in session.reduction.named_parameters()}
    started, said = time.monotonic(), "nothing"
    try:
        if what == "extra batch" and rank == 0:
            session.save("/nowhere", wait_s=2.0)
        else:
            session.train_batch({"ids": toys.rows(plan, 1), "use_branch": what == "extra batch" or rank == 0})
    except Exception as error:  # noqa: BLE001 - whatever it is
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - started
    unchanged = all(torch.equal(before[key], parameter) for key, parameter in session.reduction.named_parameters())
    return said, took, unchanged


OUT_OF_STEP = [("ddp2", "extra batch"), ("fsdp2", "unused layer"), ("ddp2", "unused layer"), ("fsdp2", "extra batch")]


@pytest.mark.parametrize(("name", "what"), OUT_OF_STEP if ALL else OUT_OF_STEP[:2])
def test_g3_ranks_that_do_different_things_hear_of_it_within_the_timeout_and_train_nothing_wrong(name, what):
    for outcome in run_ranks(out_of_step, 2, name, what, timeout_s=60):
        said, took, unchanged = outcome.value
        assert said != "nothing" and took < TIMEOUT_S + 5.0 and unchanged, outcome.value
        if what == "extra batch" and outcome.rank == 0:
            assert "rank 1 did not call it within 2 s" in said


# ---- G4 --------------------------------------------------------------------------------------------------------------


def limits(plan, root: str):
    """Time limit of every process group that is there after training and saving, but the default one's."""
    session = toys.make(plan)
    session.train_batch(toys.rows(plan, 0))
    session.save(root, asynchronous=True).wait()
    session.load(root)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    cpu = torch.device("cpu")
    return sorted((group.group_desc, group._get_backend(cpu).options._timeout.total_seconds()) for group in groups)


LIMITED = {
    "ddp2": Plan(dp_replicate=2, timeout_s=21.0),
    "fsdp2 x tp2": Plan(dp_shard=2, tp=2, timeout_s=21.0),
    "hsdp": Plan(dp_replicate=2, dp_shard=2, timeout_s=21.0),
}


@pytest.mark.parametrize("name", list(LIMITED) if ALL else ["ddp2", "fsdp2 x tp2"])
def test_g4_every_process_group_has_the_timeout_of_the_plan(name, tmp_path):
    plan = LIMITED[name]
    for outcome in run_ranks(limits, plan.world_size, plan, str(tmp_path)):
        assert {limit for _, limit in outcome.value} == {21.0}, outcome.value
        assert "mixle:checkpoint:gloo" in [name for name, _ in outcome.value] and len(outcome.value) >= 3


# ---- a call on one rank only, and then on all ------------------------------------------------------------------------


def alone_then_together(root: str):
    """One rank calls, then only the other one, then the first again, then both."""
    session = toys.make(PLANS["ddp2"])
    said, begun = "", time.monotonic()
    for caller in (0, 1, 0):
        if dist.get_rank() == caller:
            try:
                session.save(root, wait_s=1.0)
            except mx.MixleError as error:
                said = str(error)
        dist.barrier()
    return said, session.save(root).name, time.monotonic() - begun


def test_after_calls_on_one_rank_only_the_ranks_meet_again(tmp_path):
    first, second = (outcome.value for outcome in run_ranks(alone_then_together, 2, str(tmp_path)))
    assert "rank 1 did not call it within 1 s" in first[0] and "rank 0 did not call it within 1 s" in second[0]
    assert first[1] == second[1] == "step-00000000" and max(first[2], second[2]) < 3.0 + TIMEOUT_S


# ---- N1: counters ----------------------------------------------------------------------------------------------------


def skipped(root: str):
    plan = PLANS["ddp2"]
    session = toys.make(plan)
    session.train_batch(toys.rows(plan, 0))
    weight = dict(session.reduction.named_parameters())["norm.weight"].data
    kept = weight.clone()
    weight[0] = math.nan if dist.get_rank() else kept[0]
    receipt = session.train_batch(toys.rows(plan, 1))
    weight.copy_(kept)
    session.train_batch(toys.rows(plan, 2))
    session.save(root)
    again = toys.make(plan)
    again.load(root)
    ours, theirs = toys.whole_state(again), toys.whole_state(session)
    return (
        receipt.skipped,
        (again.num_skipped, again.update),
        (session.num_skipped, session.update),
        all(torch.equal(ours[key], theirs[key]) for key in theirs),
    )


def test_n1_skipped_updates_are_counted_alike_on_every_rank_and_in_the_checkpoint(tmp_path):
    for outcome in run_ranks(skipped, 2, str(tmp_path)):
        why, resumed, unbroken, equal = outcome.value
        assert why.startswith("non-finite gradient") and resumed == unbroken == (1, 3) and equal

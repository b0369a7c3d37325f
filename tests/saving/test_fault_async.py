"""A1 and A2: a save beside the training has the values of the moment of the call, disturbs nothing, and never fails in silence."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import toys

import mixle_core as mx
from mixle_core.checkpoint import CheckpointError, open_checkpoint, steps
from mixle_core.runtime.saving import state as engine
from mixle_core.runtime.saving.meeting import Meeting
from mixle_core.testing import run_ranks

Plan = mx.ParallelPlan
DDP2, FSDP2 = Plan(dp_replicate=2), Plan(dp_shard=2)
ALL = int(os.environ.get("MIXLE_FAULTS", "0")) >= 50
BESIDE = [DDP2, FSDP2, Plan(dp_shard=2, tp=2)] if ALL else [DDP2]


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state of a step, as `toys.whole_state` names them."""
    with open_checkpoint(path) as opened:
        return {
            f"{kind}:{name}": opened.read(name, kind, (0,) * len(found.shape), found.shape)
            for name, kinds in opened.metadata.tensors.items()
            for kind, found in kinds.items()
            if kind != "buffer"
        }


# ---- A1 --------------------------------------------------------------------------------------------------------------


class Live:
    """Hands out what it holds, not a copy."""

    def __init__(self, held):
        self.held = held

    def state_dict(self):
        return self.held

    def load_state_dict(self, state) -> None:
        self.held = state


class Gate:
    """Holds the thread of a save back until everything has been changed."""

    def __enter__(self):
        self.real, self.opened = engine.save_together, threading.Event()
        engine.save_together = self.held_back
        return self.opened

    def held_back(self, *args):
        assert self.opened.wait(60)
        return self.real(*args)

    def __exit__(self, *_):
        self.opened.set()
        engine.save_together = self.real


def changed_at_once(root: str, plan):
    session = toys.make(plan)
    session.train_batch(toys.rows(plan, 0))
    before = toys.whole_state(session)
    seen = session.reduction.model.seen.clone()
    optimizer, scheduler = session.optimizers["**"], session.schedulers["**"]
    rate, bases = optimizer.param_groups[0]["lr"], list(scheduler.base_lrs)
    own = {"rows": [1, 2], "deep": {"list": [{"a": 1}], "pair": (1, [2])}, "order": torch.arange(6), "part": torch.arange(6)[1:4]}
    metadata = {"runs": ["first"], "deep": {"n": 1}}
    alive = Live(own)
    with Gate() as opened:
        handle = session.save(root, asynchronous=True, state={"own": alive, "plain": own["rows"]}, metadata=metadata)
        with torch.no_grad():
            for parameter in session.reduction.model.parameters():
                parameter.add_(1.0)
            for state in optimizer.state.values():
                for value in state.values():
                    value.add_(1.0)
            session.reduction.model.seen.add_(5)
            own["order"].add_(9)
        own["rows"].append(3)
        own["deep"]["list"][0]["a"] = 2
        own["deep"]["list"].append("late")
        own["deep"]["pair"][1].append(3)
        own["new"] = object()
        metadata["runs"][0] = "second"
        metadata["deep"]["n"] = 2
        optimizer.param_groups[0]["lr"] = 5.0
        scheduler.base_lrs[0] = 5.0
        torch.manual_seed(99)
        opened.set()
        handle.wait()
    again = toys.make(plan)
    loaded = again.load(root, state={"own": alive, "plain": None})
    return (
        equal(toys.whole_state(again), before),
        torch.equal(again.reduction.model.seen, seen),
        (again.optimizers["**"].param_groups[0]["lr"], again.schedulers["**"].base_lrs) == (rate, bases),
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in alive.held.items()},
        loaded.state,
        loaded.metadata,
    )


@pytest.mark.parametrize("plan", [Plan(), DDP2, FSDP2], ids=["one", "ddp2", "fsdp2"])
def test_a1_what_is_saved_is_what_was_there_when_the_call_returned(plan, tmp_path):
    for outcome in run_ranks(changed_at_once, plan.world_size, str(tmp_path), plan):
        state, buffer, options, own, plain, metadata = outcome.value
        assert state and buffer and options
        assert own == {"rows": [1, 2], "deep": {"list": [{"a": 1}], "pair": (1, [2])}, "order": [0, 1, 2, 3, 4, 5], "part": [1, 2, 3]}
        assert plain == {"plain": [1, 2]} and metadata == {"runs": ["first"], "deep": {"n": 1}}


def three_in_a_row(root: str):
    """Each is called while the one before it is held up in the middle: they come one after the other."""
    session = toys.make(FSDP2)
    states, begun = {}, time.monotonic()
    for update in range(3):
        session.train_batch(toys.rows(FSDP2, update))
        states[update + 1] = toys.whole_state(session)
        handle = session.save(
            root, asynchronous=True, metadata={"at": update}, hook=lambda point, by: time.sleep(0.3) if point == "data" else None
        )
    handle.wait()
    return time.monotonic() - begun, [equal(stored(entry.path), states[entry.step]) for entry in steps(root)]


def test_a1_a2_three_saves_in_a_row_are_serialised_and_hold_their_own_values(tmp_path):
    for outcome in run_ranks(three_in_a_row, 2, str(tmp_path)):
        seconds, own_values = outcome.value
        assert own_values == [True] * 3 and seconds > 0.9


# ---- A2 --------------------------------------------------------------------------------------------------------------


def beside_training(root: str, plan, save: bool):
    session = toys.make(plan)
    losses, states, busy = [], {}, 0
    handle = None
    for update in range(36):
        losses.append(session.train_batch(toys.rows(plan, update)).loss)
        if save and update % 9 == 3:
            states[update + 1] = toys.whole_state(session)
            handle = session.save(root, asynchronous=True, hook=lambda point, by: time.sleep(0.05))
        busy += handle is not None and not handle.done
    if save:
        handle.wait()
        assert all(equal(stored(entry.path), states[entry.step]) for entry in steps(root)) and len(states) == 4
    return losses, toys.whole_state(session), [entry.step for entry in steps(root)] if save else [], busy


@pytest.mark.parametrize("plan", BESIDE, ids=["ddp2", "fsdp2", "fsdp2 x tp2"][: len(BESIDE)])
def test_a2_saves_beside_many_updates_change_no_bit_of_them(plan, tmp_path):
    with_saves = run_ranks(beside_training, plan.world_size, str(tmp_path), plan, True)
    without = run_ranks(beside_training, plan.world_size, str(tmp_path), plan, False)
    for one, other in zip(with_saves, without, strict=True):
        losses, state, committed, busy = one.value
        assert losses == other.value[0] and equal(state, other.value[1])
        assert committed == [4, 13, 22, 31] and busy >= 8


def polled(root: str, rounds: int):
    """Saves fail on one rank while all train; where and as what each rank heard of it, and whether training goes on."""
    session = toys.make(DDP2)
    rank = dist.get_rank()
    heard, update = [], 0
    real = Meeting.share

    def late(meeting: Meeting, value):
        found = real(meeting, value)
        time.sleep(0.03 * rank)  # the second rank hears of it some updates after the first
        return found

    Meeting.share = late
    for number in range(rounds):

        def hook(point: str, by: int, number: int = number) -> None:
            if point == "data" and by == 1:
                time.sleep(0.004 * number)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        session.save(f"{root}/{number}", asynchronous=True, hook=hook)
        told = []
        for _ in range(400):
            time.sleep(0.002 * rank)
            try:
                session.train_batch(toys.rows(DDP2, update))
            except mx.MixleError as error:
                told.append((session.update, type(error).__name__, str(error)))
            update += 1
            if told and told[0][0] + 3 <= session.update:
                break
        heard.append(told)
    path = session.save(f"{root}/last")
    return heard, path.name, toys.whole_state(session)


def test_a2_a_failure_nobody_waited_for_is_raised_once_at_the_same_update_on_every_rank_and_training_goes_on(tmp_path):
    first, second = (outcome.value for outcome in run_ranks(polled, 2, str(tmp_path), 8))
    assert first[0] == second[0]
    for told in first[0]:
        ((_, kind, text),) = told
        assert kind == "CheckpointError" and text.startswith("rank 1: ") and "EIO (Input/output error)" in text
    assert first[1] == second[1] and equal(first[2], second[2])


def staging_fails(root: str):
    session = toys.make(FSDP2)
    session.train_batch(toys.rows(FSDP2, 0))

    class Broken:
        def state_dict(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    started = time.monotonic()
    handle = session.save(root, asynchronous=True, state={"loader": Broken()} if dist.get_rank() else {})
    try:
        handle.wait()
        said = "nothing"
    except CheckpointError as error:
        said = str(error)
    took = time.monotonic() - started
    session.train_batch(toys.rows(FSDP2, 1))  # the failure was taken: nobody hears of it again
    name = session.save(root, asynchronous=True).wait().name
    return said, took, name, [path.name for path in Path(root).iterdir()]


def test_a2_a_state_that_cannot_be_had_on_one_rank_is_an_error_on_all(tmp_path):
    for outcome in run_ranks(staging_fails, 2, str(tmp_path)):
        said, took, name, left = outcome.value
        assert said.startswith("rank 1: OSError: [Errno 5] Input/output error") and took < 5.0
        assert name == "step-00000002" and left == [name]


SCRIPT = """
import errno, os, sys
import torch
import mixle_core as mx
from mixle_core.testing import next_token_loss, toy_model

session = mx.prepare(toy_model(), mx.ParallelPlan(dp_replicate=2, timeout_s=60.0), loss=next_token_loss, optimizer=torch.optim.AdamW)

def hook(point, rank):
    if sys.argv[2] == "fails" and rank == 1:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

session.save(sys.argv[1], asynchronous=True, hook=hook)
print("the end")
"""


def test_a2_a_process_that_ends_without_having_asked_ends_in_success_only_if_the_save_did(tmp_path):
    processes = []
    for fate in ("fails", "works"):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(2):
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            arguments = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / fate), fate]
            processes.append(subprocess.Popen(arguments, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=180)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    for code, out, err in ended[:2]:
        assert code == 1 and out == "the end\n"
        (line,) = err.strip().splitlines()
        assert line.startswith("mixle: rank 1: ") and "EIO (Input/output error); way out: the device failed" in line
    assert [(code, out, err) for code, out, err in ended[2:]] == [(0, "the end\n", "")] * 2
    assert steps(tmp_path / "fails") == () and [entry.step for entry in steps(tmp_path / "works")] == [0]

"""W1, S2, D1, S1: storage that fails, state that cannot be stored, steps that are damaged: every rank says so, and nothing is lost."""

from __future__ import annotations

import errno
import os
import pickle
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
from mixle_core.runtime import load_training_state, save_training_state
from mixle_core.testing import run_ranks

ALL = int(os.environ.get("MIXLE_FAULTS", "0")) >= 50
SOON_S = 5.0
"""2 s on a machine of its own; this one runs other tests beside."""


@pytest.fixture
def disk(tmp_path, request):
    """A file system of a few MiB that can be made read-only: mounts it, or skips where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


# ---- W1: one fault in one call, on one rank or all -------------------------------------------------------------------


class Unsendable(Exception):  # noqa: N818 - no error of ours
    """Pickles to nothing, and has no text either."""

    def __init__(self):
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Failing:
    """State that cannot be had."""

    def state_dict(self):
        raise Unsendable


def eio(*_):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Storage:
    """Lets one call of the operating system fail for files whose name holds `part`, as a device that breaks does."""

    def __init__(self, call: str, part: str):
        self.call, self.part, self.real = call, part, getattr(os, call)

    def __enter__(self):
        setattr(os, self.call, self.failing)

    def __exit__(self, *_):
        setattr(os, self.call, self.real)

    def failing(self, *args, **options):
        name = args[1] if self.call == "rename" else str(Path(f"/proc/self/fd/{args[0]}").readlink())
        if self.part in str(name):
            eio()
        return self.real(*args, **options)


FAULTS = {
    "write data": (Storage, "write", "data-"),
    "fsync data": (Storage, "fsync", "data-"),
    "write metadata": (Storage, "write", "metadata.json"),
    "rename metadata": (Storage, "rename", "metadata.json"),
    "fsync success": (Storage, "fsync", "_SUCCESS"),
    "permissions": (Storage, "fchmod", ".part-"),
    "hook success": ("success",),
    "unsendable": (),
}
FIRST_ONLY = ("metadata", "success", "permissions")
"""Only the first rank writes these."""


def names(root: str) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir())


def values(step: int) -> torch.Tensor:
    return torch.arange(60_000) % 1009 + 1000.0 * step


def model_of(step: int):
    model = torch.nn.ParameterDict({f"p{n}": torch.nn.Parameter(values(step) + n / 8) for n in range(4)})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def saved(root: str, step: int, *, asynchronous: bool = False, **options):
    model, optimizer = model_of(step)
    handle = save_training_state(model, optimizer, root, step=step, asynchronous=asynchronous, **options)
    return handle.wait() if asynchronous else handle


def loads(root: str, step: int) -> bool:
    model, optimizer = model_of(0)
    wanted, _ = model_of(step)
    found = load_training_state(model, optimizer, root)
    return found.step == step and all(torch.equal(model[name], wanted[name]) for name in wanted)


def failed(root: str, step: int, **options):
    """What a save raised: text, errno and rank, and after how long."""
    started = time.monotonic()
    try:
        saved(root, step, **options)
    except CheckpointError as error:
        return str(error), error.errno, error.rank, time.monotonic() - started
    return "nothing", "", "", 0.0


def storage_fails(root: str):
    """Each fault x who x how; what each rank heard, what was listed and left, and whether the next save worked."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for fault, made in FAULTS.items():
        for who in ("first",) if any(word in fault for word in FIRST_ONLY) else ("first", "last", "all"):
            for asynchronous in (False, True):
                place = f"{root}/{fault}-{who}-{asynchronous}"
                saved(place, 1)
                mine = who == "all" or rank == {"first": 0, "last": size - 1}[who]
                options = {"asynchronous": asynchronous}
                if fault == "unsendable":
                    said = failed(place, 2, **options, state={"loader": Failing()} if mine else {})
                elif fault.startswith("hook"):
                    said = failed(
                        place, 2, **options, hook=lambda point, by, made=made, mine=mine: eio() if mine and point in made else None
                    )
                elif mine:
                    with made[0](*made[1:]):
                        said = failed(place, 2, **options)
                else:
                    said = failed(place, 2, **options)
                dist.barrier()
                listed, left = [entry.step for entry in steps(place)], names(place)
                dist.barrier()
                before = loads(place, 1)
                saved(place, 2, **options)
                found[fault, who, asynchronous] = said, listed, left, before, loads(place, 2)
    return found


@pytest.mark.parametrize("disk", [64], indirect=True)
@pytest.mark.parametrize("ranks", [2, 3] if ALL else [3])
def test_w1_a_device_that_fails_is_an_error_on_every_rank_and_the_next_save_works(ranks, disk):
    outcomes = [outcome.value for outcome in run_ranks(storage_fails, ranks, str(disk), reuse=True)]
    for case in outcomes[0]:
        fault, who, _ = case
        texts = set()
        for found in outcomes:
            (text, number, by, seconds), listed, left, before, after = found[case]
            texts.add(text)
            assert seconds < SOON_S, (case, seconds)
            assert listed == [1] and left == ["step-00000001"] and before and after, (case, listed, left, before, after)
            if fault == "unsendable":
                assert text.endswith("Unsendable: its text cannot be had: RuntimeError"), text
            else:
                assert "EIO (Input/output error); way out: the device failed" in text and number == "EIO (Input/output error)", (case, text)
                assert "step-00000002.part-" in text, text
            assert by == (str(ranks - 1) if who == "last" else "0") and text.startswith(f"rank {by}: "), (case, by)
        assert len(texts) == 1, texts


def full(root: str, asynchronous: bool):
    rank = dist.get_rank()
    saved(root, 1)
    if rank == 0:
        Path(root, "filler").write_bytes(bytes(700_000))
    dist.barrier()
    said = failed(root, 2, asynchronous=asynchronous)
    dist.barrier()
    listed, left = [entry.step for entry in steps(root)], names(root)
    dist.barrier()
    if rank == 0:
        Path(root, "filler").unlink()
    dist.barrier()
    saved(root, 2, asynchronous=asynchronous, keep=1)
    return said, listed, left, loads(root, 2)


@pytest.mark.parametrize("disk", [2], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_w1_a_full_disk(asynchronous, disk):
    for outcome in run_ranks(full, 2, str(disk), asynchronous, reuse=True):
        (text, number, by, seconds), listed, left, after = outcome.value
        assert number == "ENOSPC (No space left on device)" and f"{number}; way out: free space there" in text
        assert f"rank {by}: {disk}/step-00000002.part-" in text and seconds < SOON_S
        assert listed == [1] and left == ["filler", "step-00000001"] and after


def read_only(root: str, asynchronous: bool, when: str):
    rank = dist.get_rank()
    saved(root, 1)
    dist.barrier()

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", root], check=True, capture_output=True)

    def hook(point: str, by: int) -> None:
        if point == when and by == 0:
            remount("ro")

    if when == "begin" and rank == 0:
        remount("ro")
    dist.barrier()
    said = failed(root, 2, asynchronous=asynchronous, hook=hook)
    dist.barrier()
    if rank == 0:
        remount("rw")
    dist.barrier()
    listed = [entry.step for entry in steps(root)]
    dist.barrier()
    saved(root, 2, asynchronous=asynchronous)
    return said, listed, loads(root, 2)


@pytest.mark.parametrize("disk", [4], indirect=True)  # the attempt that could not be removed stays
@pytest.mark.parametrize(("when", "asynchronous"), [("begin", False), ("begin", True), ("success", False), ("success", True)])
def test_w1_a_file_system_that_becomes_read_only(when, asynchronous, disk):
    """At "success", all is written but the rename."""
    for outcome in run_ranks(read_only, 2, str(disk), asynchronous, when, reuse=True):
        (text, number, by, seconds), listed, after = outcome.value
        assert (
            by == "0" and number == "EROFS (Read-only file system)" and f"{number}; way out: choose a directory that can be written" in text
        ), text
        assert str(disk) in text and seconds < SOON_S and listed == [1] and after


# ---- S2 --------------------------------------------------------------------------------------------------------------


def unknown_object(root: str, asynchronous: bool):
    saved(root, 1)
    said = failed(root, 2, asynchronous=asynchronous, state={"thing": {"inner": [object()] if dist.get_rank() else [1]}})
    dist.barrier()
    return said, names(root), loads(root, 1)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_s2_an_object_that_cannot_be_stored_is_refused_on_all_ranks_and_the_step_before_is_as_it_was(asynchronous, tmp_path):
    for outcome in run_ranks(unknown_object, 2, str(tmp_path), asynchronous, reuse=True):
        (text, _, by, _), left, before = outcome.value
        assert text.startswith("rank 1: thing['inner'][0]: cannot store a builtins.object") and by == "1"
        assert left == ["step-00000001"] and before


# ---- D1, S1 ----------------------------------------------------------------------------------------------------------

PLAN = mx.ParallelPlan(dp_shard=2)


def damaged(root: str, name: str, how: str):
    """Two steps, of which the newer one is damaged; what loading said, and what training said after it."""
    session = toys.make(PLAN)
    for update in range(2):
        session.train_batch(toys.rows(PLAN, update))
        session.save(root)
        if update == 0:
            first = toys.whole_state(session)
    dist.barrier()
    path = Path(root, "step-00000002", name)
    if dist.get_rank() == 0:
        data = bytearray(path.read_bytes())
        if how == "bit":
            data[-5] ^= 4
        path.write_bytes(data[:-1] if how == "cut" else data)
    dist.barrier()
    said = []
    for call in (lambda: session.load(f"{root}/step-00000002"), lambda: session.train_batch(toys.rows(PLAN, 0))):
        try:
            call()
            said.append("nothing")
        except mx.MixleError as error:
            said.append(f"{type(error).__name__}: {error}")
    again = session.load(f"{root}/step-00000001")
    state = toys.whole_state(session)
    equal = state.keys() == first.keys() and all(torch.equal(state[key], first[key]) for key in first)
    session.train_batch(toys.rows(PLAN, 1))
    return said, again.step, equal, session.update, session.load(root).step if name == "_SUCCESS" else None


@pytest.mark.parametrize(
    ("name", "how"),
    [("data-00000-000.safetensors", "bit"), ("data-00001-000.safetensors", "bit"), ("data-00001-000.safetensors", "cut"),
     ("metadata.json", "bit"), ("_SUCCESS", "bit"), ("_SUCCESS", "cut")],
)  # fmt: skip
def test_d1_damage_is_refused_on_every_rank_with_the_file_and_nothing_trains_on_until_another_step_is_loaded(name, how, tmp_path):
    for outcome in run_ranks(damaged, 2, str(tmp_path), name, how, reuse=True):
        (loading, training), step, equal, update, newest = outcome.value
        assert loading.startswith("CheckpointError: rank ") and f"step-00000002/{name}" in loading, loading
        assert training.startswith("UsageError: a load failed halfway, so parameters and optimizer are undefined")
        assert (step, equal, update) == (1, True, 2)
        assert newest in (None, 1), "what is not committed is not the newest"


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_s1_a_load_without_ranks_unpickles_nothing_at_all(tmp_path, monkeypatch):
    """The state of a whole session, with planted pickles beside it; ranks would exchange pickles of their own."""
    root, mark = tmp_path / "run", tmp_path / "ran"
    session = toys.make(mx.ParallelPlan())
    session.train_batch(toys.rows(mx.ParallelPlan(), 0))
    path = session.save(root, state={"loader": {"at": [1, (2, 3)]}})
    for name in (".metadata", "__0.metadata", "__0_0.distcp"):
        (path / name).write_bytes(pickle.dumps(Planted(str(mark))))
        (root / name).write_bytes(pickle.dumps(Planted(str(mark))))
    wanted = toys.whole_state(session)

    def refuse(*_, **__):
        raise AssertionError("something unpickles")

    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        monkeypatch.setattr(module, name, refuse)
    again = toys.make(mx.ParallelPlan())
    assert again.load(root, state={"loader": None}).state == {"loader": {"at": [1, (2, 3)]}}
    found = toys.whole_state(again)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert not mark.exists()
    with open_checkpoint(path) as opened:
        opened.verify()

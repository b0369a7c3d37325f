"""A save is there whole, or not at all, wherever it is cut short; and every failure says where and why."""

import contextlib
import errno
import os
import pickle
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
import torch

from mixle_core.checkpoint import (
    CheckpointError,
    Piece,
    begin,
    commit,
    data_file,
    discard,
    latest,
    open_checkpoint,
    steps,
    survey,
    write_data,
)

POINTS = ["data", "metadata", "success", "rename"]


def in_child(work):
    """Run in a forked process; returns its exit status."""
    child = os.fork()
    if not child:
        code = 99
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_ends_at_any_point_leaves_the_step_before(tmp_path, save, is_step, point):
    first = save(tmp_path, 1)

    def hook(reached):
        if reached == point:
            os._exit(7)

    assert in_child(lambda: save(tmp_path, 2, hook=hook)) == 7
    assert is_step(first, 1)
    left = [path for path in tmp_path.iterdir() if ".part-" in path.name]
    if point == "rename":
        assert left == []
        assert [entry.step for entry in steps(tmp_path)] == [1, 2]
        assert is_step(latest(tmp_path), 2)
    else:
        assert len(left) == 1
        assert [entry.step for entry in survey(tmp_path)] == [1]
        assert latest(tmp_path) == first
        assert is_step(save(tmp_path, 2), 2), "saving again works beside what is left"


def test_20_kills_at_random_moments(tmp_path, save, is_step):
    first = save(tmp_path, 1)
    started = time.perf_counter()
    assert in_child(lambda: save(tmp_path, 2)) == 0
    takes = time.perf_counter() - started
    chosen, seen = random.Random(3), set()
    for step in range(3, 23):
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                save(tmp_path, step)
            os._exit(0)
        time.sleep(chosen.uniform(0, 1.2 * takes))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listed = {entry.step: entry for entry in survey(tmp_path)}
        assert all(entry.problem is None for entry in listed.values())
        assert is_step(first, 1)
        if step in listed:
            assert is_step(listed[step].path, step)
        seen.add(step in listed)
    assert seen == {True, False}, "some were cut short and some were not"


def test_a_committed_step_is_never_written_again(tmp_path, save, is_step):
    first = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step-00000001: the step is committed already; .*; way out: "):
        begin(tmp_path, 1)
    part = begin(tmp_path, 2)
    other = save(tmp_path, 2)
    records = write_data(part, data_file(0), [Piece("w", "p", (1,), (0,), torch.ones(1))])
    with pytest.raises(CheckpointError, match="step-00000002: the step is committed already"):
        commit(part, records, {})
    assert is_step(first, 1) and is_step(other, 2)
    discard(part)
    discard(part)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("flag", [True, False], ids=["renameat2", "without it"])
@pytest.mark.parametrize("there", ["empty directory", "full directory", "file", "link", "step"])
def test_what_appears_just_before_the_rename_is_not_replaced(tmp_path, save, is_step, there, flag, monkeypatch):
    if not flag:
        module = sys.modules["mixle_core.checkpoint.commit"]
        monkeypatch.setattr(module.ctypes, "CDLL", lambda *_, **__: object())
    final = tmp_path / "step-00000001"

    def appear(point):
        if point == "success":
            if there == "step":
                save(tmp_path / "other", 1).rename(final)
            elif there == "file":
                final.touch()
            elif there == "link":
                final.symlink_to(tmp_path / "nowhere")
            else:
                final.mkdir()
                if there == "full directory":
                    (final / "x").touch()

    with pytest.raises(CheckpointError, match=r"step-00000001: the (path exists|step is committed already)"):
        save(tmp_path, 1, hook=appear)
    assert final.is_symlink() or final.exists()
    if there == "empty directory":
        assert list(final.iterdir()) == []
    if there == "step":
        assert is_step(final, 1)


@pytest.mark.parametrize("flag", [True, False], ids=["renameat2", "without it"])
def test_the_rename_itself_replaces_nothing(tmp_path, monkeypatch, flag):
    """As when something appears after the last look: only a kernel without the flag replaces an empty directory, and none a step."""
    module = sys.modules["mixle_core.checkpoint.commit"]
    monkeypatch.setattr(module, "_require_absent", lambda final: None)
    if not flag:
        monkeypatch.setattr(module.ctypes, "CDLL", lambda *_, **__: object())
    source, empty, full = (tmp_path / name for name in ("source", "empty", "full"))
    for place in (source, empty, full):
        place.mkdir()
    (full / "x").touch()
    for target in (full, *((empty,) if flag else ())):
        with pytest.raises(OSError, match=r"File exists|not empty"):
            module._rename_noreplace(source, target)
    assert source.exists()


def test_of_commits_at_the_same_time_one_wins(tmp_path):
    """Also when both have seen that the step is not there."""
    parts = [begin(tmp_path, 1) for _ in range(4)]
    barrier, outcomes = threading.Barrier(4), [None] * 4

    def work(index):
        records = write_data(parts[index], data_file(0), [Piece("w", "p", (1,), (0,), torch.full((1,), float(index)))])
        try:
            commit(parts[index], records, {"writer": index}, hook=lambda point: barrier.wait(60) if point == "success" else None)
            outcomes[index] = "won"
        except CheckpointError as error:
            outcomes[index] = str(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count("won") == 1
    assert sum("is committed already" in str(outcome) for outcome in outcomes) == 3
    with open_checkpoint(tmp_path / "step-00000001") as opened:
        winner = outcomes.index("won")
        assert (opened.value("writer"), opened.read("w", "p", (0,), (1,)).item()) == (winner, winner)


def test_an_attempt_is_private_and_a_step_as_readable_as_its_root(tmp_path, save):
    root = tmp_path / "deep" / "root"
    part = begin(root, 12)
    assert part.name.startswith("step-00000012.part-")
    assert part.parent == root
    assert stat.S_IMODE(part.stat().st_mode) == 0o700
    root.chmod(0o755)
    assert stat.S_IMODE(save(root, 13).stat().st_mode) == 0o755
    root.chmod(0o750)
    assert stat.S_IMODE(save(root, 14).stat().st_mode) == 0o750


def test_everything_is_durable_before_the_rename_and_the_rename_before_the_end(tmp_path, save, monkeypatch):
    """What a power cut could undo: each file, then its name, is made durable in order."""
    done, fsync = [], os.fsync

    def record(descriptor):
        fsync(descriptor)
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(str(tmp_path))
        done.append(path.replace(".part-", "@").split("@")[0] + ("/" + path.split("/")[2].split(".")[0] if path.count("/") > 1 else ""))

    monkeypatch.setattr(os, "fsync", record)
    save(tmp_path, 1, hook=done.append)
    step = "/step-00000001"
    assert done == [
        "data", f"{step}/data-00000-000", "data", f"{step}/data-00001-000",
        f"{step}/metadata", step, "metadata", f"{step}/_SUCCESS", step, "success", step, "rename", "",
    ]  # fmt: skip


def _written(tmp_path):
    part = begin(tmp_path, 1)
    one, two = torch.ones(2, 3), torch.zeros(2, 3)
    first = write_data(part, data_file(0), [Piece("w", "parameter", (4, 3), (0, 0), one)])
    return part, first, write_data(part, data_file(1), [Piece("w", "parameter", (4, 3), (2, 0), two)])


def _moved_away(file):
    file.symlink_to(file.rename(file.parent.parent / "x"))


REFUSED = {
    "a record lost": (lambda part, a, b: a, "its chunks have 6 elements, the tensor 12"),
    "a record twice": (lambda part, a, b: a + a + b, "its chunks have 18 elements, the tensor 12"),
    "a block twice": (lambda part, a, b: a + tuple(attrs.evolve(r, offset=(0, 0)) for r in b), "its chunks overlap"),
    "two shapes": (lambda part, a, b: a + tuple(attrs.evolve(r, shape=(5, 3)) for r in b), "expected one shape and dtype"),
    "two dtypes": (lambda part, a, b: a + tuple(attrs.evolve(r, dtype="int32") for r in b), "expected one shape and dtype"),
    "a file cut": (lambda part, a, b: os.truncate(part / data_file(1), 100) or a + b, "100 bytes; expected"),
    "a file gone": (lambda part, a, b: (part / data_file(1)).unlink() or a + b, "data-00001-000.safetensors: missing; expected exactly"),
    "a file without record": (
        lambda part, a, b: (part / data_file(2)).touch() or a + b,
        "data-00002-000.safetensors: there without a record",
    ),
    "a link": (lambda part, a, b: _moved_away(part / data_file(1)) or a + b, "ELOOP"),
    "another sum": (lambda part, a, b: a + tuple(attrs.evolve(r, checksum="1" * 64) for r in b), "expected a crc32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_read_is_not_committed(tmp_path, name):
    change, said = REFUSED[name]
    part, first, second = _written(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        commit(part, change(part, first, second), {})
    assert survey(tmp_path) == ()


def test_values_that_cannot_be_stored_and_wrong_arguments_are_refused(tmp_path):
    part, first, second = _written(tmp_path)
    for values, said in [
        ({"a": {"b": torch.ones(1)}}, r"^a\['b'\]: cannot store a torch\.Tensor"),
        ({1: 2}, "a key of type int"),
        ({"\ud800": 1}, "surrogates"),
    ]:
        with pytest.raises(CheckpointError, match=said):
            commit(part, first + second, values)
    with pytest.raises(CheckpointError, match="expected one of crc32, sha256"):
        commit(part, first + second, {}, checksum="md5")
    with pytest.raises(CheckpointError, match=r"versions\.x is 3; expected text"):
        commit(part, first + second, {}, versions={"x": 3})
    for wrong in (tmp_path, tmp_path / "step-00000001", tmp_path / "step-1.part-0123456789abcdef"):
        with pytest.raises(CheckpointError, match="no directory of an attempt"):
            commit(wrong, first + second, {})
        with pytest.raises(CheckpointError, match="no directory of an attempt"):
            discard(wrong)
    for step in (-1, True, 1.0, 10**12, "1"):
        with pytest.raises(CheckpointError, match="expected a whole number"):
            begin(tmp_path, step)
    with open_checkpoint(commit(part, first + second, {}, versions={"plugin": "1.2"})) as opened:
        assert opened.success.versions == {"mixle-core": "0.1.0", "torch": torch.__version__, "plugin": "1.2"}


def test_a_step_without_tensors_holds_values(tmp_path):
    with open_checkpoint(commit(begin(tmp_path, 10**9), [], {"a": 1})) as opened:
        assert (opened.step, opened.value("a"), dict(opened.metadata.tensors)) == (10**9, 1, {})
        opened.verify()


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MiB, that can be made read-only: mounts it, or skips where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(*options):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def _large(part, number=0):
    return write_data(part, data_file(number), [Piece(f"w{number}", "p", (400_000,), (0,), torch.ones(400_000))])


def test_a_full_disk_is_an_error_with_its_number_and_the_next_save_works(disk, save, is_step):
    root = disk("size=1m")
    first = save(root, 1)
    part = begin(root, 2)
    with pytest.raises(CheckpointError) as error:
        _large(part)
    assert str(error.value) == (
        f"{part}/data-00000-000.safetensors: could not be written: ENOSPC (No space left on device); "
        "way out: free space there, or save elsewhere"
    )
    assert (error.value.errno, error.value.path) == ("ENOSPC (No space left on device)", f"{part}/data-00000-000.safetensors")
    discard(part)
    assert is_step(first, 1)
    assert is_step(save(root, 2), 2)


@pytest.mark.parametrize(("calls", "name"), [(1, "data-00001-000.safetensors"), (2, "metadata.json"), (3, "_SUCCESS")])
def test_a_disk_that_fills_up_in_between_commits_nothing(disk, save, calls, name):
    root, reached = disk("size=1m"), []

    def fill(point):
        reached.append(point)
        if len(reached) == calls:
            with contextlib.suppress(OSError), (root / "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

    with pytest.raises(CheckpointError, match=rf"{name}: could not be written: ENOSPC \(No space left on device\)"):
        save(root, 1, hook=fill)
    assert survey(root) == ()


def test_a_read_only_file_system_is_an_error_with_its_number(disk, save):
    root = disk("size=1m")
    save(root, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True, capture_output=True)
    with pytest.raises(CheckpointError, match=r"could not be made: EROFS \(Read-only file system\); way out: choose a directory that can"):
        begin(root, 2)
    assert [entry.step for entry in steps(root)] == [1]


def test_a_limit_on_file_sizes_is_an_error_with_its_number(tmp_path):
    part = begin(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"EFBIG \(File too large\)"):
            _large(part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("point", POINTS)
def test_an_error_of_the_device_at_any_point_commits_nothing_before_the_rename(tmp_path, save, point):
    """A hook stands for the device: none can be made to fail here."""

    def fail(reached):
        if reached == point:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(CheckpointError, match=r"EIO \(Input/output error\); way out: the device failed"):
        save(tmp_path, 1, hook=fail)
    assert [entry.step for entry in steps(tmp_path)] == ([1] if point == "rename" else [])


def test_a_file_in_the_way_of_the_root_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "root"):
        with pytest.raises(CheckpointError, match=r"EEXIST|ENOTDIR"):
            begin(root, 1)


def test_errors_cross_processes_as_text(tmp_path):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path / "nowhere")
    sent = pickle.loads(pickle.dumps(error.value.on_rank(3)))
    assert type(sent) is CheckpointError
    assert (sent.rank, sent.path, sent.errno) == ("3", f"{tmp_path}/nowhere", "ENOENT (No such file or directory)")
    assert str(sent) == (
        f"rank 3: {tmp_path}/nowhere: could not be opened: ENOENT (No such file or directory); "
        "way out: check the path; another process may have removed it"
    )
    assert {type(value) for value in (*sent.args, *vars(sent).values())} == {str}


NO_COPY = """
import resource
import sys
import torch
from mixle_core.checkpoint import Piece, begin, commit, data_file, write_data

tensor = torch.ones(48, 1024, 1024).transpose(1, 2)
part = begin(sys.argv[1], 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
commit(part, write_data(part, data_file(0), [Piece("w", "p", tuple(tensor.shape), (0, 0, 0), tensor)]), {})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_writing_makes_no_copy_of_the_state(tmp_path):
    """192 MiB that are not contiguous, written with less than 80 MiB more."""
    done = subprocess.run([sys.executable, "-c", NO_COPY, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 80 * 1024
    assert len(steps(tmp_path)) == 1

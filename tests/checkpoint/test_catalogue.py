"""Steps are found by looking; what is deleted is never half there."""

import os
import time

import pytest

from mixle_core.checkpoint import CheckpointError, begin, clean, discard, latest, prune, steps, survey


def age(path, seconds):
    for entry in (*path.iterdir(), path):
        os.utime(entry, (time.time() - seconds,) * 2)


def test_steps_are_listed_in_order_with_their_size_and_nothing_else_is(tmp_path, save):
    for step in (10, 9, 123456789):
        save(tmp_path, step)
    part = begin(tmp_path, 11)
    for name in ("step-12", "step-000000012", "step-0000001a", "latest", "step-00000013.removed-0123456789abcdef", "step-00000014.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000015").touch()
    found = steps(tmp_path)
    assert [entry.step for entry in found] == [9, 10, 123456789]
    assert [entry.path.name for entry in found] == ["step-00000009", "step-00000010", "step-123456789"]
    for entry in found:
        sizes = {file.name: file.stat().st_size for file in entry.path.iterdir()}
        assert entry.num_bytes == sum(sizes.values()) - sizes["_SUCCESS"]
    assert latest(tmp_path) == tmp_path / "step-123456789"
    odd = [entry for entry in survey(tmp_path) if entry.problem]
    assert [entry.step for entry in odd] == [15]
    assert "ENOTDIR" in odd[0].problem
    discard(part)


def test_a_step_without_a_valid_success_is_surveyed_with_the_reason_and_not_a_step(tmp_path, save):
    whole, broken = save(tmp_path, 1), save(tmp_path, 2)
    (broken / "_SUCCESS").unlink()
    assert latest(tmp_path) == whole
    assert [entry.problem is None for entry in survey(tmp_path)] == [True, False]
    assert survey(tmp_path)[1].problem == f"{broken}/_SUCCESS: missing, so the directory is no committed checkpoint; way out: load another"
    renamed = whole.rename(tmp_path / "step-00000007")
    assert "it is of step 1; expected step 7" in {entry.step: entry.problem for entry in survey(tmp_path)}[7]
    assert latest(tmp_path) is None
    assert renamed.exists()


def test_no_root_has_no_latest_and_cannot_be_listed(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    assert steps(tmp_path) == ()
    with pytest.raises(CheckpointError, match=r"nowhere: could not be listed: ENOENT"):
        steps(tmp_path / "nowhere")


def test_pruning_keeps_the_newest_and_what_does_not_load(tmp_path, save, is_step):
    paths = {step: save(tmp_path, step) for step in range(1, 6)}
    (paths[1] / "metadata.json").unlink()
    (paths[5] / "_SUCCESS").write_bytes(b"")
    assert prune(tmp_path, 4) == ()
    assert prune(tmp_path, 2) == (2,)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (1, 3, 4, 5)]
    assert is_step(paths[4], 4)
    assert prune(tmp_path, 1) == (3,)
    assert prune(tmp_path, 1) == ()
    for keep in (0, -1, True, 1.0):
        with pytest.raises(CheckpointError, match="expected at least 1"):
            prune(tmp_path, keep)


def test_a_step_that_is_half_deleted_is_not_listed_and_goes_the_next_time(tmp_path, save):
    for step in (1, 2):
        save(tmp_path, step)
    half = (tmp_path / "step-00000001").rename(tmp_path / "step-00000001.removed-0123456789abcdef")
    (half / "data-00000-000.safetensors").unlink()
    assert [entry.step for entry in survey(tmp_path)] == [2]
    assert prune(tmp_path, 1) == ()
    assert not half.exists()


def test_dead_attempts_are_cleaned_and_those_that_run_are_not(tmp_path, save):
    step = save(tmp_path, 1)
    dead, running, writes, mine = (begin(tmp_path, 2) for _ in range(4))
    for part in (dead, running, writes, mine):
        (part / "data-00000-000.safetensors").write_bytes(b"x")
    for part in (dead, writes, mine):
        age(part, 25 * 3600)
    os.utime(writes / "data-00000-000.safetensors")
    age(step, 1e6)
    assert clean(tmp_path, running=mine) == (dead,)
    assert not dead.exists()
    assert all(path.exists() for path in (running, writes, mine, step))
    assert set(clean(tmp_path, older_than_s=0, running=mine)) == {running, writes}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, step.name])

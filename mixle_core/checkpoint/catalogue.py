"""The steps under a directory: found by looking, never by what a file says is the latest."""

from __future__ import annotations

import shutil
import stat
import time
from pathlib import Path

import attrs

from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.files import (
    METADATA,
    SUCCESS,
    committed_step,
    directory,
    is_removed,
    os_errors,
    part_step,
    random_suffix,
    read_small,
    require_size,
)
from mixle_core.checkpoint.manifest import MAX_SUCCESS_BYTES, Success, parse_success

DEAD_AFTER_S = 24 * 3600.0
"""An attempt in which nothing was written for so long is taken for dead."""


@attrs.frozen
class Step:
    """One directory that is named like a step.

    Args:
        num_bytes: of all its files; 0 with a problem.
        problem: why it does not load, or None.
    """

    step: int
    path: Path
    num_bytes: int = 0
    problem: str | None = None


def survey(root: Path | str) -> tuple[Step, ...]:
    """Every directory named like a step, the oldest first, those that do not load with the reason.

    `_SUCCESS` is validated, and every file's presence and size; contents are checked by those who read them.

    Raises:
        CheckpointError: the root cannot be listed.
    """
    place = Path(root)
    found = []
    for name in _names(place):
        step = committed_step(name)
        if step is None:
            continue
        try:
            with directory(place / name) as opened:
                success = read_success(opened, place / name)
                sizes = {**success.files, METADATA: success.metadata_size}
                for file, size in sizes.items():
                    require_size(opened, file, place / name, size)
            found.append(Step(step, place / name, sum(sizes.values())))
        except CheckpointError as error:
            found.append(Step(step, place / name, problem=str(error)))
    return tuple(sorted(found, key=lambda entry: entry.step))


def steps(root: Path | str) -> tuple[Step, ...]:
    """The committed steps, the oldest first. A directory that is not whole is not among them; `survey` says why.

    Raises:
        CheckpointError: the root cannot be listed.
    """
    return tuple(entry for entry in survey(root) if entry.problem is None)


def latest(root: Path | str) -> Path | None:
    """The committed step with the highest number; None when there is none, or no directory."""
    if not Path(root).exists():
        return None
    found = steps(root)
    return found[-1].path if found else None


def prune(root: Path | str, keep: int) -> tuple[int, ...]:
    """Delete all but the `keep` newest committed steps; called after a commit, so that what remains is newer than what goes.

    Each is first renamed, so that half a step is never listed. Steps that do not load are neither counted nor touched.

    Returns:
        The steps that went.

    Raises:
        CheckpointError: keep below 1, or what the operating system refused.
    """
    if type(keep) is not int or keep < 1:
        raise CheckpointError(f"keep={keep!r}; expected at least 1: the newest step is never deleted; way out: keep=1, or do not prune")
    place = Path(root)
    gone = [entry.step for entry in steps(place)[:-keep] if _remove(entry.path)]
    for name in _names(place):
        if is_removed(name):
            _delete(place / name)
    return tuple(gone)


def clean(root: Path | str, *, older_than_s: float = DEAD_AFTER_S, running: Path | str | None = None) -> tuple[Path, ...]:
    """Delete what attempts left that died: `.part` directories in which nothing was written for `older_than_s` seconds.

    A running save writes; the age is that of the newest file, or of the directory. An attempt that was only stopped finds its
    directory gone and fails; it can harm nothing.

    Args:
        running: an attempt that is kept whatever its age.

    Returns:
        The directories that went.

    Raises:
        CheckpointError: what the operating system refused.
    """
    place = Path(root)
    gone = []
    for name in _names(place):
        path = place / name
        if part_step(name) is None or (running is not None and Path(running).name == name):
            continue
        written = _last_written(path)
        if written is not None and time.time() - written >= older_than_s and _remove(path):
            gone.append(path)
    return tuple(gone)


def read_success(opened: int, path: Path) -> Success:
    """`_SUCCESS` of an open directory, which must be named after its step when it is named like one.

    Raises:
        CheckpointError: missing, damaged, of another format, or of another step.
    """
    where = str(path / SUCCESS)
    try:
        data = read_small(opened, SUCCESS, path, size=None, limit=MAX_SUCCESS_BYTES)
    except CheckpointError as error:
        if error.errno.startswith("ENOENT"):
            text = f"{where}: missing, so the directory is no committed checkpoint; way out: load another"
            raise CheckpointError(text, path=where, errno=error.errno) from error
        raise
    success = parse_success(data, where)
    named = committed_step(path.name)
    if named is not None and named != success.step:
        refuse(where, f"it is of step {success.step}", f"step {named}, as its directory is named")
    return success


def _names(place: Path) -> list[str]:
    with os_errors("could not be listed", place):
        return sorted(child.name for child in place.iterdir())


def _last_written(path: Path) -> float | None:
    """When anything in an attempt last changed, in seconds of the epoch; None when it is gone, or no directory."""
    with os_errors("could not be looked into", path):
        try:
            status = path.lstat()
            times = [child.lstat().st_mtime for child in path.iterdir()] if stat.S_ISDIR(status.st_mode) else None
        except FileNotFoundError:  # another process commits, discards or cleans it
            return None
    return None if times is None else max([status.st_mtime, *times])


def _remove(path: Path) -> bool:
    """Rename, then delete; False when another process was faster."""
    away = path.with_name(f"{path.name}.removed-{random_suffix()}")
    with os_errors("could not be removed", path):
        try:
            path.rename(away)
        except FileNotFoundError:
            return False
    _delete(away)
    return True


def _delete(path: Path) -> None:
    with os_errors("could not be removed", path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return  # by another process

"""From a private directory to a committed step: everything is checked and durable before one rename makes it visible."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import mixle_core
from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.files import (
    METADATA,
    SUCCESS,
    committed_step,
    directory,
    os_errors,
    part_step,
    random_suffix,
    require_size,
    step_name,
    write_durable,
)
from mixle_core.checkpoint.manifest import Success, metadata_bytes, parse_metadata, parse_success, success_bytes
from mixle_core.checkpoint.shards import CHECKSUMS, Record

MAX_STEP = 10**12 - 1

_NOREPLACE = 1
_AT_FDCWD = -100


def begin(root: Path | str, step: int) -> Path:
    """Make the private directory of one attempt to save a step; one rank does, and tells the others its path.

    Args:
        root: where the steps of a run lie; made when there is none.

    Returns:
        The directory `step-00000012.part-<random>`, readable by this user only.

    Raises:
        CheckpointError: the step is committed already, or what the operating system refused.
    """
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise CheckpointError(f"step={step!r}; expected a whole number from 0 to {MAX_STEP}; way out: count updates from 0")
    place = Path(root).absolute()
    with os_errors("could not be made", place):
        missing = [folder for folder in (place, *place.parents) if not folder.exists()]
        place.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)
    _require_absent(place / step_name(step))
    part = place / f"{step_name(step)}.part-{random_suffix()}"
    with os_errors("could not be made", part):
        part.mkdir(mode=0o700)
    return part


def commit(
    part: Path | str,
    records: Iterable[Record],
    values: Mapping[str, Any],
    *,
    checksum: str = "crc32",
    versions: Mapping[str, str] | None = None,
    hook: Callable[[str], None] | None = None,
) -> Path:
    """Make an attempt a step, on one rank, after every rank's data files are written.

    Args:
        part: from `begin`.
        records: of all data files of all ranks, from `write_data`.
        values: everything that is no tensor, by key.
        checksum: that the data files were written with.
        versions: of the packages concerned, besides those of mixle-core and torch.
        hook: called with "metadata", "success" and "rename" when that is done: for tests. An OSError from it counts as one of the device.

    Returns:
        The directory of the step.

    Raises:
        CheckpointError: a file is missing or has another size, the chunks of a tensor are not the tensor, a value that cannot be stored,
            the step exists, or what the operating system refused. The attempt is then no step; `discard` removes it. Only an error that
            says so comes after the rename.
    """
    path = Path(part).absolute()
    step = part_step(path.name)
    if step is None:
        raise CheckpointError(f"{path}: no directory of an attempt; way out: take it from begin(root, step)", path=str(path))
    if checksum not in CHECKSUMS:
        raise CheckpointError(f"checksum={checksum!r}; expected one of {', '.join(CHECKSUMS)}; way out: choose one of them")
    final = path.with_name(step_name(step))
    written = tuple(records)
    sizes: dict[str, int] = {}
    for record in written:
        sizes[record.file] = max(sizes.get(record.file, 0), record.begin + record.length)
    metadata = metadata_bytes(written, values)
    success = Success(
        step=step,
        checksum=checksum,
        metadata_size=len(metadata),
        metadata_sha256=hashlib.sha256(metadata).hexdigest(),
        files=dict(sorted(sizes.items())),
        versions={"mixle-core": mixle_core.__version__, "torch": str(torch.__version__), **(versions or {})},
    )
    # what a reader would refuse is not committed
    declared = success_bytes(success)
    parse_metadata(metadata, parse_success(declared, str(path / SUCCESS)), str(path / METADATA))
    _require_absent(final)
    with directory(path) as opened:
        _require_written(opened, path, sizes)
        write_durable(opened, METADATA, path, metadata)
        _reach("metadata", path, hook)
        write_durable(opened, SUCCESS, path, declared)
        _reach("success", path, hook)
        with os_errors("could not be made readable", path):  # as far as the directory of all steps is; until now it was private
            os.fchmod(opened, os.fstat(opened).st_mode & 0o7000 | path.parent.stat().st_mode & 0o777 | 0o700)
            os.fsync(opened)
    _rename(path, final)
    _reach("rename", final, hook)
    try:
        _sync(path.parent)
    except CheckpointError as error:
        text = f"{error}; {final.name} is committed, but a power cut may undo that"
        raise CheckpointError(text, path=error.path, errno=error.errno) from error
    return final


def discard(part: Path | str) -> None:
    """Remove an attempt that failed; one that is gone is no error.

    Raises:
        CheckpointError: the path is that of no attempt, or what the operating system refused.
    """
    path = Path(part)
    if part_step(path.name) is None:
        raise CheckpointError(f"{path}: no directory of an attempt; way out: only what begin made is discarded", path=str(path))
    with os_errors("could not be removed", path):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return


def _reach(point: str, path: Path, hook: Callable[[str], None] | None) -> None:
    if hook is not None:
        with os_errors(f"could not be written ({point})", path):
            hook(point)


def _require_written(opened: int, path: Path, sizes: Mapping[str, int]) -> None:
    with os_errors("could not be listed", path):
        found = set(os.listdir(opened))
    if found != set(sizes):
        odd = min(found ^ set(sizes))
        what = "there without a record" if odd in found else "missing"
        refuse(str(path / odd), what, "exactly the files that ranks reported", "save again, and commit the records of every rank")
    for name, size in sizes.items():
        require_size(opened, name, path, size, "save again")


def _require_absent(final: Path) -> None:
    if os.path.lexists(final):
        committed = committed_step(final.name) is not None and (final / SUCCESS).exists()
        raise CheckpointError(
            f"{final}: {'the step is committed already' if committed else 'the path exists'}; expected none, because a committed step is "
            "never written again; way out: save another step or into another directory",
            path=str(final),
        )


def _rename(path: Path, final: Path) -> None:
    """One rename that replaces nothing, not even an empty directory."""
    try:
        _rename_noreplace(path, final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            _require_absent(final)
        with os_errors(f"could not be renamed to {final.name}", path):
            raise


def _rename_noreplace(path: Path, final: Path) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if call is not None:
        if call(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(final), _NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code))
    # without the flag a rename still refuses to replace a directory with files, as every committed one is
    _require_absent(final)
    path.rename(final)


def _sync(folder: Path) -> None:
    with directory(folder, follow=True) as opened, os_errors("could not be made durable", folder):
        os.fsync(opened)

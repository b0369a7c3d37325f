"""Names, opening and durable writing of the files of a checkpoint: relative to an open directory, no link followed."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from mixle_core.checkpoint.errors import from_os_error, refuse

METADATA = "metadata.json"
SUCCESS = "_SUCCESS"

BUFFER_BYTES = 2**20
"""Data is read and written in pieces of this size, each checked while it is in the processor's cache."""

_DATA = re.compile(r"data-[0-9]{5,7}-[0-9]{3}\.safetensors")
_STEP = re.compile(r"step-([0-9]{8,12})")
_PART = re.compile(r"step-([0-9]{8,12})\.part-[0-9a-f]{16}")
_REMOVED = re.compile(r"step-[0-9]{8,12}\.(?:part-[0-9a-f]{16}\.)?removed-[0-9a-f]{16}")


def data_file(rank: int, number: int = 0) -> str:
    """The name of the data file that writer `number` of a rank writes."""
    return f"data-{rank:05d}-{number:03d}.safetensors"


def is_data_file(name: object) -> bool:
    """Whether this may be the name of a data file: no other names are ever opened."""
    return isinstance(name, str) and _DATA.fullmatch(name) is not None


def step_name(step: int) -> str:
    """The name of the directory of a committed step."""
    return f"step-{step:08d}"


def committed_step(name: str) -> int | None:
    """The step in the name of a committed directory; None for every other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def part_step(name: str) -> int | None:
    """The step in the name of the private directory of an attempt; None for every other name."""
    found = _PART.fullmatch(name)
    return int(found[1]) if found and name.startswith(step_name(int(found[1])) + ".") else None


def is_removed(name: str) -> bool:
    """Whether a directory was renamed in order to be deleted."""
    return _REMOVED.fullmatch(name) is not None


def random_suffix() -> str:
    """Sixteen hexadecimal digits that no other attempt has."""
    return secrets.token_hex(8)


@contextlib.contextmanager
def directory(path: Path, *, follow: bool = False) -> Iterator[int]:
    """A descriptor of a directory.

    Args:
        follow: whether the directory may be a link; what is read never is.

    Raises:
        CheckpointError: there is none, or it may not be opened.
    """
    with os_errors("could not be opened", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def os_errors(doing: str, path: Path | str) -> Iterator[None]:
    """Turn what the operating system refuses into a CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error, doing, os.fspath(path)) from error


def open_regular(parent: int, name: str, path: Path) -> tuple[int, int]:
    """A regular file for reading, and its size: (descriptor, bytes).

    Args:
        parent: descriptor of the directory.
        path: of that directory, for errors.

    Raises:
        CheckpointError: missing, a link, or no regular file.
    """
    whole = os.fspath(path / name)
    with os_errors("could not be opened", whole):
        # without O_NONBLOCK, opening a pipe that somebody planted would wait for ever
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        refuse(whole, "no regular file", "a regular file")
    return descriptor, status.st_size


def require_size(parent: int, name: str, path: Path, size: int, way_out: str = "the checkpoint is damaged: load another step") -> None:
    """Check that a file is there, is a regular file and has its size.

    Raises:
        CheckpointError: naming the file, with both sizes.
    """
    descriptor, found = open_regular(parent, name, path)
    os.close(descriptor)
    if found != size:
        refuse(os.fspath(path / name), f"{found} bytes", f"{size}", way_out)


def read_small(parent: int, name: str, path: Path, *, size: int | None, limit: int) -> bytes:
    """A whole file, whose size is compared before anything is allocated.

    Args:
        size: that it must have, or None.
        limit: largest size that is read, in bytes.

    Raises:
        CheckpointError: another size.
    """
    whole = os.fspath(path / name)
    descriptor, found = open_regular(parent, name, path)
    try:
        if size is not None and found != size:
            refuse(whole, f"{found} bytes", f"{size}")
        if found > limit:
            refuse(whole, f"{found} bytes", f"at most {limit}")
        with os_errors("could not be read", whole), os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(found)
    finally:
        os.close(descriptor)
    if len(data) != found:
        refuse(whole, f"it ends after {len(data)} bytes", f"{found}")
    return data


def write_durable(parent: int, name: str, path: Path, data: bytes) -> None:
    """Write a file whole or not at all, and make it and its name survive a power cut.

    Raises:
        CheckpointError: it could not be written.
    """
    temporary = f"{name}.{random_suffix()}.tmp"
    with os_errors("could not be written", path / name):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=parent)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte; a call may take fewer than it is given."""
    while len(data):
        data = data[os.write(descriptor, data) :]

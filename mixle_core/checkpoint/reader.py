"""Reading: any block of any tensor, whatever blocks were written, with the checksum of every chunk that is touched."""

from __future__ import annotations

import contextlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from mixle_core.checkpoint.catalogue import read_success
from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.files import BUFFER_BYTES, METADATA, directory, open_regular, os_errors, read_small, require_size
from mixle_core.checkpoint.manifest import MAX_METADATA_BYTES, Chunk, Metadata, Stored, Success, parse_metadata
from mixle_core.checkpoint.shards import Checksum, byte_view, chunk_key, header, require_little_endian
from mixle_core.errors import explain_failure

_OPEN_FILES = 16


def open_checkpoint(path: Path | str, *, verify: bool = True) -> Checkpoint:
    """Open a committed step. No code from the directory runs: it holds JSON and raw bytes.

    `_SUCCESS` and `metadata.json` are checked whole, and every file's size, before anything else is read or allocated.

    Args:
        path: of the step's directory, which may not be a link.
        verify: compare the checksum of every chunk that is read.

    Raises:
        CheckpointError: it is not exactly what a save writes; the file is named.
    """
    require_little_endian()
    place = Path(path).absolute()
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(directory(place))
        success = read_success(opened, place)
        for name, size in success.files.items():
            require_size(opened, name, place, size)
        data = read_small(opened, METADATA, place, size=success.metadata_size, limit=MAX_METADATA_BYTES)
        metadata = parse_metadata(data, success, str(place / METADATA))
        return Checkpoint(place, success, metadata, _Files(place, opened, success, metadata, stack.pop_all()), verify=verify)


class Checkpoint:
    """A committed step, open for reading; close it, or use it in a `with` block. One thread at a time.

    Args:
        success: what `_SUCCESS` says: step, checksum, files and versions.
        metadata: what `metadata.json` says: tensors, opaque tensors and values.
    """

    def __init__(self, path: Path, success: Success, metadata: Metadata, files: _Files, *, verify: bool) -> None:
        self.path = path
        self.success = success
        self.metadata = metadata
        self._files = files
        self._verify = verify
        self._last: tuple[Chunk, torch.Tensor] | None = None

    @property
    def step(self) -> int:
        """The update after which it was saved."""
        return self.success.step

    @property
    def values(self) -> Mapping[str, Any]:
        """Everything that is no tensor, by key; shared, so copy before changing."""
        return self.metadata.values

    def kinds(self, name: str) -> tuple[str, ...]:
        """The kinds that there are of a tensor; empty when it was not saved."""
        return tuple(self.metadata.tensors.get(name, ()))

    def stored(self, name: str, kind: str) -> Stored:
        """Dtype, shape and chunks of a whole tensor.

        Raises:
            CheckpointError: it was not saved.
        """
        found = self.metadata.tensors.get(name, {}).get(kind)
        if found is None:
            there = ", ".join(self.kinds(name)) or "nothing"
            text = f"{self.path}: no {kind!r} of {name}; there is {there}; way out: load a checkpoint that has it"
            raise CheckpointError(text, path=str(self.path))
        return found

    def value(self, key: str) -> Any:
        """A value by key.

        Raises:
            CheckpointError: it was not saved.
        """
        if key not in self.values:
            there = ", ".join(self.values) or "none"
            raise CheckpointError(f"{self.path}: no value {key!r}; there are {there}; way out: ask for one of them", path=str(self.path))
        return self.values[key]

    def opaque(self, key: str) -> torch.Tensor:
        """An opaque tensor, whole, on the CPU.

        Raises:
            CheckpointError: it was not saved, or its bytes differ from what was written.
        """
        stored = self.metadata.opaque.get(key)
        if stored is None:
            there = ", ".join(self.metadata.opaque) or "none"
            raise CheckpointError(f"{self.path}: no tensor {key!r}; there are {there}; way out: ask for one of them", path=str(self.path))
        found = self._empty(stored.shape, stored)
        self._read(stored, (0,) * len(stored.shape), found)
        return found

    def read(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """One block, on the CPU, in memory of its own.

        Args:
            kind: "parameter", or a key of its optimizer state.
            offset, shape: of the block, in the whole tensor.

        Raises:
            CheckpointError: not saved, not inside the tensor, or its bytes differ from what was written.
        """
        stored = self._inside(name, kind, offset, shape)
        found = self._empty(shape, stored)
        self._read(stored, tuple(offset), found)
        return found

    def read_into(self, name: str, kind: str, offset: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill a tensor with the block of its shape; without a copy when it is contiguous and on the CPU. The dtype must be equal.

        After an error, what is in `out` is undefined.

        Raises:
            CheckpointError: as `read`, or another dtype.
        """
        stored = self._inside(name, kind, offset, tuple(out.shape))
        if out.dtype != stored.torch_dtype:
            raise CheckpointError(
                f"{self.path}: {name} ({kind}) is {stored.dtype}; expected {out.dtype}; way out: read it, then convert", path=str(self.path)
            )
        self._read(stored, tuple(offset), out.detach())

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read every byte of every data file and compare every checksum.

        Args:
            progress: called with the bytes done and their total.

        Raises:
            CheckpointError: naming every file and chunk that is wrong.
        """
        total, done, wrong = sum(self.success.files.values()), 0, []
        buffer = memoryview(bytearray(BUFFER_BYTES))
        chunks = sorted(self.metadata.chunks(), key=lambda found: (found[3].file, found[3].begin))
        unreadable: set[str] = set()
        for name in self.success.files:
            try:
                self._files.open(name)
            except CheckpointError as error:
                unreadable.add(name)
                wrong.append(str(error).partition("; way out:")[0])
        for name, kind, _, chunk in chunks:
            if chunk.file not in unreadable:
                try:
                    self._files.check(chunk, name if kind is None else f"{name} ({kind})", buffer)
                except CheckpointError as error:
                    wrong.append(str(error).partition("; way out:")[0])
            done += chunk.length
            if progress is not None:
                progress(done, total)
        if wrong:
            raise CheckpointError(
                explain_failure(f"{self.path}: {len(wrong)} of its {len(chunks)} chunks cannot be believed", wrong, "load another step"),
                path=str(self.path),
            )
        if progress is not None:
            progress(total, total)

    def close(self) -> None:
        """Close the files."""
        self._last = None
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _inside(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Stored:
        stored = self.stored(name, kind)
        if not len(offset) == len(shape) == len(stored.shape) or any(
            a < 0 or n < 0 or a + n > whole for a, n, whole in zip(offset, shape, stored.shape, strict=False)
        ):
            raise CheckpointError(
                f"{self.path}: {name} ({kind}) has shape {list(stored.shape)}; asked for a block at {list(offset)} of shape {list(shape)}; "
                "way out: ask for a block inside it",
                path=str(self.path),
            )
        return stored

    def _read(self, stored: Stored, offset: tuple[int, ...], out: torch.Tensor) -> None:
        """Fill `out` from every chunk that has part of it; together they have all of it, as the manifest was checked to say."""
        shape = tuple(out.shape)
        for chunk in stored.chunks:
            if not chunk.length:
                self._files.open(chunk.file)  # there is nothing to read, but its header confirms dtype and shape
            low = tuple(map(max, offset, chunk.offset))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, chunk.offset, chunk.size, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            target, source = out, chunk.offset
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                target = target.narrow(dim, a - offset[dim], b - a)
            if tuple(target.shape) == chunk.size and target.is_contiguous() and target.device.type == "cpu":
                self._load(chunk, target)
                continue
            block = self._whole(chunk, stored)
            for dim, (a, b) in enumerate(zip(low, high, strict=True)):
                block = block.narrow(dim, a - source[dim], b - a)
            target.copy_(block)

    def _whole(self, chunk: Chunk, stored: Stored) -> torch.Tensor:
        """All of a chunk, for a block that is only part of it; the last one is kept for the next such block."""
        if self._last is None or self._last[0] != chunk:
            self._last = None  # never two
            block = self._empty(chunk.size, stored)
            self._load(chunk, block)
            self._last = chunk, block
        return self._last[1]

    def _empty(self, shape: tuple[int, ...], stored: Stored) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=stored.torch_dtype)
        except (RuntimeError, MemoryError) as error:
            number = math.prod(shape) * stored.torch_dtype.itemsize
            text = f"{self.path}: no memory for a block of {number} bytes; way out: read smaller blocks"
            raise CheckpointError(text, path=str(self.path)) from error

    def _load(self, chunk: Chunk, block: torch.Tensor) -> None:
        self._files.load(chunk, byte_view(block), verify=self._verify)


class _Files:
    """The data files of an open checkpoint; each is opened at its first use, and its header compared byte for byte."""

    def __init__(self, path: Path, parent: int, success: Success, metadata: Metadata, stack: contextlib.ExitStack) -> None:
        self._path = path
        self._parent = parent
        self._success = success
        self._metadata = metadata
        self._stack = stack
        self._checked: set[str] = set()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._heads: dict[str, list[tuple[str, str, tuple[int, ...], int, int]]] | None = None

    def open(self, name: str) -> int:
        """A descriptor of a data file."""
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        descriptor, size = open_regular(self._parent, name, self._path)
        try:
            if size != self._success.files[name]:
                refuse(str(self._path / name), f"{size} bytes", str(self._success.files[name]))
            if name not in self._checked:
                self._check_header(name, descriptor)
                self._checked.add(name)
        except BaseException:
            os.close(descriptor)
            raise
        self._open[name] = descriptor
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def load(self, chunk: Chunk, target: memoryview, *, verify: bool) -> None:
        """Read a whole chunk into memory."""
        checksum = Checksum(self._success.checksum)
        descriptor = self.open(chunk.file)
        for start in range(0, chunk.length, BUFFER_BYTES):
            block = target[start : start + BUFFER_BYTES]
            self._fill(descriptor, chunk.file, chunk.begin + start, block)
            if verify:
                checksum.update(block)
        if verify:
            self._compare(chunk, checksum, "")

    def check(self, chunk: Chunk, what: str, buffer: memoryview) -> None:
        """Read a whole chunk and keep nothing of it."""
        checksum = Checksum(self._success.checksum)
        descriptor = self.open(chunk.file)
        for start in range(0, chunk.length, BUFFER_BYTES):
            block = buffer[: min(BUFFER_BYTES, chunk.length - start)]
            self._fill(descriptor, chunk.file, chunk.begin + start, block)
            checksum.update(block)
        self._compare(chunk, checksum, f"{what}, ")

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        self._stack.close()

    def _compare(self, chunk: Chunk, checksum: Checksum, what: str) -> None:
        found = checksum.digits()
        if found != chunk.checksum:
            refuse(
                str(self._path / chunk.file),
                f"{what}bytes {chunk.begin} to {chunk.begin + chunk.length} have {self._success.checksum} {found}",
                f"{chunk.checksum}, as they were written",
            )

    def _fill(self, descriptor: int, name: str, begin: int, block: memoryview) -> None:
        with os_errors("could not be read", self._path / name):
            while len(block):
                number = os.preadv(descriptor, [block], begin)
                if not number:
                    refuse(str(self._path / name), f"it ends at byte {begin}", f"{self._success.files[name]} bytes")
                block, begin = block[number:], begin + number

    def _check_header(self, name: str, descriptor: int) -> None:
        if self._heads is None:
            self._heads = {file: [] for file in self._success.files}
            for tensor, kind, stored, chunk in self._metadata.chunks():
                key = chunk_key(tensor, kind, chunk.offset)
                self._heads[chunk.file].append((key, stored.dtype, chunk.size, chunk.begin, chunk.begin + chunk.length))
        entries = self._heads.pop(name)
        base = min(begin for *_, begin, _ in entries)
        expected = header((key, dtype, size, begin - base, end - base) for key, dtype, size, begin, end in entries)
        if len(expected) != base:
            refuse(str(self._path / name), f"its data begins at byte {base}", f"{len(expected)}, after the header of its chunks")
        found = bytearray(base)
        self._fill(descriptor, name, 0, memoryview(found))
        if bytes(found) != expected:
            refuse(str(self._path / name), "its header differs from metadata.json", "the chunks, dtypes and shapes that stand there")

"""Data files: blocks of tensors, streamed in safetensors format with a checksum of each chunk; no copy of the whole is made."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import torch

from mixle_core.checkpoint.errors import CheckpointError
from mixle_core.checkpoint.files import BUFFER_BYTES, directory, is_data_file, os_errors, write_all
from mixle_core.checkpoint.values import dump_json, encode

CHUNK_BYTES = 32 * 2**20
"""A block larger than this is written as several chunks: a reader that wants part of it reads and checks little more than that part."""

CHECKSUMS = ("crc32", "sha256")

MAX_DIMS = 64

FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMATS}
"""By the name that the manifest gives them."""


@attrs.frozen(eq=False)
class Piece:
    """A block of one whole tensor, to be written.

    Args:
        name: of the whole tensor; or the key of a tensor that no other rank has a part of, such as a generator's state.
        kind: "parameter", or a key of its optimizer state; None for a tensor that is opaque: only ever read whole.
        shape: of the whole tensor.
        offset: where the block begins on every dimension of the whole tensor.
        tensor: the block, on any device; or a function that gives it when its turn comes. It is not changed, and not kept.
        size: shape of the block, and `dtype` its dtype: needed when `tensor` is a function.
    """

    name: str
    kind: str | None
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor | Callable[[], torch.Tensor]
    size: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


def opaque(key: str, tensor: torch.Tensor) -> Piece:
    """A tensor that is read whole or not at all, in a namespace of its own: the state of a generator, a loader's permutation."""
    return Piece(key, None, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


@attrs.frozen
class Record:
    """A chunk that was written; plain values, to be sent to the rank that commits.

    Args:
        dtype: its name, such as "bfloat16".
        offset, size: of the chunk in the whole tensor.
        begin: its first byte, counted from the start of the file.
        length: in bytes.
        checksum: in hexadecimal digits.
    """

    name: str
    kind: str | None
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int
    checksum: str


class Checksum:
    """A running checksum of one chunk."""

    def __init__(self, algorithm: str) -> None:
        self._crc = 0
        self._hash = hashlib.sha256() if algorithm == "sha256" else None

    def update(self, data: memoryview) -> None:
        """Take in more of the chunk."""
        if self._hash is None:
            self._crc = zlib.crc32(data, self._crc)
        else:
            self._hash.update(data)

    def digits(self) -> str:
        """In hexadecimal."""
        return f"{self._crc:08x}" if self._hash is None else self._hash.hexdigest()


def chunk_key(name: str, kind: str | None, offset: Sequence[int]) -> str:
    """The name of a chunk in its data file: `parameter:model.weight@0,16`; an opaque tensor's has nothing before the colon."""
    return f"{kind or ''}:{name}@{','.join(map(str, offset))}"


def header(entries: Iterable[tuple[str, str, Sequence[int], int, int]]) -> bytes:
    """The head of a data file: 8 bytes of length, then JSON padded with spaces to a multiple of 8. One form only.

    Args:
        entries: (key, dtype, size, begin, end) of every chunk, bytes counted from the end of the header.
    """
    ordered = sorted(entries, key=lambda entry: (entry[3], entry[4], entry[0]))
    document = {
        key: {"dtype": FORMATS[DTYPES[dtype]], "shape": list(size), "data_offsets": [begin, end]}
        for key, dtype, size, begin, end in ordered
    }
    text = dump_json(document)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def require_little_endian() -> None:
    """Refuse a machine whose bytes have another order than the files.

    Raises:
        CheckpointError: on such a machine.
    """
    if sys.byteorder != "little":
        raise CheckpointError("a big-endian machine; expected little-endian, as the files are; way out: use another machine")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


@attrs.frozen(eq=False)
class _Chunk:
    piece: Piece
    dtype: torch.dtype
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def offset(self) -> tuple[int, ...]:
        return tuple(a + b for a, b in zip(self.piece.offset, self.start, strict=True))

    @property
    def length(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


def write_data(
    part: Path | str,
    file: str,
    pieces: Iterable[Piece],
    *,
    checksum: str = "crc32",
    hook: Callable[[str], None] | None = None,
) -> tuple[Record, ...]:
    """Write one data file into the private directory of a save, and make it survive a power cut.

    Memory beyond the state: one chunk, for what is not contiguous or not on the CPU; what a function gives is dropped once written.

    Args:
        part: from `begin`.
        file: from `data_file`; it must not exist.
        pieces: blocks of any tensors. Blocks without elements, of tensors that have some, are left out; without any block no file is
            written.
        checksum: "crc32", or "sha256".
        hook: called with "data" when the last byte is written, before it is made durable: for tests.

    Returns:
        A record of every chunk, to be handed to `commit`.

    Raises:
        CheckpointError: a tensor that cannot be stored, two blocks with one name, or what the operating system refused. Nothing of a
            refused file counts: discard the part.
    """
    require_little_endian()
    if checksum not in CHECKSUMS:
        raise CheckpointError(f"checksum={checksum!r}; expected one of {', '.join(CHECKSUMS)}; way out: choose one of them")
    if not is_data_file(file):
        raise CheckpointError(f"{file!r}: no name of a data file; way out: take it from data_file(rank, number)")
    # the largest items first: every tensor is then aligned to its item size, for readers that map the file
    chunks = sorted(_chunks(pieces), key=lambda chunk: -chunk.dtype.itemsize)
    if not chunks:
        return ()
    ends = list(itertools.accumulate((chunk.length for chunk in chunks), initial=0))
    keys = [chunk_key(chunk.piece.name, chunk.piece.kind, chunk.offset) for chunk in chunks]
    names = [_name(chunk.dtype) for chunk in chunks]
    if len(set(keys)) != len(keys):
        doubled = next(key for key in keys if keys.count(key) > 1)
        raise CheckpointError(f"{file}: {doubled} is given twice; expected every block once; way out: let one rank write each block")
    head = header((key, name, c.size, a, b) for key, name, c, a, b in zip(keys, names, chunks, ends, ends[1:], strict=False))
    path = Path(part)
    with directory(path) as parent, os_errors("could not be written", path / file):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=parent)
        try:
            write_all(descriptor, memoryview(head))
            sums = [_write(descriptor, data, checksum) for data in _contents(chunks, keys)]
            if hook is not None:
                hook("data")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return tuple(
        Record(
            name=chunk.piece.name,
            kind=chunk.piece.kind,
            dtype=name,
            shape=tuple(chunk.piece.shape),
            offset=chunk.offset,
            size=chunk.size,
            file=file,
            begin=len(head) + start,
            length=chunk.length,
            checksum=digits,
        )
        for chunk, name, start, digits in zip(chunks, names, ends, sums, strict=False)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _chunks(pieces: Iterable[Piece]) -> Iterator[_Chunk]:
    """The chunks of all pieces; of a tensor without elements, one."""
    empty = set()
    for piece in pieces:
        for chunk in _cut(piece):
            if chunk.length or (piece.name, piece.kind) not in empty:
                yield chunk
            if not chunk.length:
                empty.add((piece.name, piece.kind))


def _cut(piece: Piece) -> Iterator[_Chunk]:
    """The chunks of a piece, each contiguous in it."""
    what = f"{piece.name} ({piece.kind})" if piece.kind is not None else piece.name
    for text in (piece.name, piece.kind):
        if text is not None and (not isinstance(text, str) or not text):
            raise CheckpointError(f"{text!r} as the name or kind of a tensor; expected text; way out: give it a name")
        encode(text, repr(text))
    given = piece.tensor if isinstance(piece.tensor, torch.Tensor) else None
    size = piece.size if given is None else tuple(given.shape)
    dtype = piece.dtype if given is None else given.dtype
    if size is None or dtype is None:
        raise CheckpointError(f"{what}: a function without size and dtype; expected both; way out: give them to Piece")
    if given is not None:
        _require_plain(given, what)
    if dtype not in FORMATS:
        raise CheckpointError(f"{what}: dtype {dtype}; expected one of {', '.join(DTYPES)}; way out: view it as one of them")
    if not len(piece.shape) == len(piece.offset) == len(size) <= MAX_DIMS or any(
        a < 0 or n < 0 or a + n > whole for a, n, whole in zip(piece.offset, size, piece.shape, strict=False)
    ):
        raise CheckpointError(
            f"{what}: a block at {tuple(piece.offset)} of shape {size} in a tensor of shape {tuple(piece.shape)}; expected a block "
            f"inside it, of at most {MAX_DIMS} dims; way out: check offset and shape"
        )
    if 0 in size:
        if 0 in piece.shape:  # no block of such a tensor has bytes: any stands for the whole
            yield _Chunk(piece, dtype, tuple(-begin for begin in piece.offset), tuple(piece.shape))
        return
    dim = next((index for index, extent in enumerate(size) if extent > 1), None)
    total = math.prod(size) * dtype.itemsize
    if dim is None or total <= CHUNK_BYTES:
        yield _Chunk(piece, dtype, (0,) * len(size), tuple(size))
        return
    rows = max(1, CHUNK_BYTES * size[dim] // total)
    for start in range(0, size[dim], rows):
        extent = min(rows, size[dim] - start)
        yield _Chunk(piece, dtype, tuple(start if d == dim else 0 for d in range(len(size))), (*size[:dim], extent, *size[dim + 1 :]))


def _require_plain(tensor: torch.Tensor, what: str) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        found = f"a {type(tensor).__module__}.{type(tensor).__qualname__} ({tensor.layout}, {tensor.device.type})"
        raise CheckpointError(f"{what}: {found}; expected an ordinary dense tensor with values; way out: give its local block")


def _contents(chunks: Iterable[_Chunk], keys: Iterable[str]) -> Iterator[memoryview]:
    """The bytes of one chunk after the other; what they are copied into is let go before the next is copied."""
    piece, tensor = None, None
    for chunk, key in zip(chunks, keys, strict=True):
        if chunk.piece is not piece:
            piece, tensor = chunk.piece, None
            tensor = piece.tensor if isinstance(piece.tensor, torch.Tensor) else piece.tensor()
            wanted = (chunk.dtype, tuple(tensor.shape) if piece.size is None else tuple(piece.size))
            if (tensor.dtype, tuple(tensor.shape)) != wanted:
                raise CheckpointError(
                    f"{key}: {tensor.dtype} of shape {tuple(tensor.shape)}; expected {wanted[0]} of shape {wanted[1]}, as announced; "
                    "way out: give the tensor that was planned"
                )
            _require_plain(tensor, key)
        assert tensor is not None
        block = tensor.detach()
        if not chunk.length:
            yield memoryview(b"")
            continue
        for dim, (start, extent) in enumerate(zip(chunk.start, chunk.size, strict=True)):
            block = block.narrow(dim, start, extent)
        yield byte_view(block.cpu().resolve_conj().resolve_neg().contiguous())


def _write(descriptor: int, data: memoryview, algorithm: str) -> str:
    checksum = Checksum(algorithm)
    for start in range(0, len(data), BUFFER_BYTES):
        block = data[start : start + BUFFER_BYTES]
        checksum.update(block)
        write_all(descriptor, block)
    return checksum.digits()

"""A checkpoint of plain torch (torch.distributed.checkpoint) as a committed step: one process, no ranks, and nothing in it is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from mixle_core.checkpoint.commit import begin, commit, discard
from mixle_core.checkpoint.dcp_entries import read_tensor, read_value
from mixle_core.checkpoint.dcp_metadata import DcpChunk, DcpFiles, DcpTensor, DcpValue, Place, read_entries
from mixle_core.checkpoint.dcp_state import Arranged, Source, Wishes, arrange
from mixle_core.checkpoint.errors import CheckpointError
from mixle_core.checkpoint.files import data_file
from mixle_core.checkpoint.shards import Piece, Record, require_little_endian, write_data
from mixle_core.layout import logical_name, matches

# what a save of a training writes: mixle_core.runtime.saving names them so
_PARAMETER, _BUFFER, _PATTERN = "parameter", "buffer", "**"
_FROM = "torch.distributed.checkpoint"


@attrs.frozen
class Imported:
    """What an import made.

    Args:
        path: of the committed step.
        parameters, buffers: names.
        optimizer: its class, or None when the checkpoint had none.
        scheduler: whether the state of one came along.
        rest: keys of what was neither: values are in the step's metadata, tensors are opaque.
        skipped: keys that were left out.
        alike: pairs of parameters with equal bits: tied, perhaps.
    """

    path: Path
    step: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    optimizer: str | None
    scheduler: bool
    rest: tuple[str, ...]
    skipped: tuple[str, ...]
    alike: tuple[tuple[str, str], ...]


def import_dcp(
    source: Path | str,
    root: Path | str,
    *,
    step: int | None = None,
    model: str | None = None,
    optimizer: str | None = None,
    buffers: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    order: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    checksum: str = "crc32",
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Write a stock checkpoint of torch.distributed.checkpoint as a committed step, which loads under any plan.

    It takes what `dcp.save` wrote of `get_state_dict(...)`, flattened or not, of `{"model": model.state_dict(), "optimizer":
    optimizer.state_dict()}`, or of a model alone. Bits stay as they are. At most one chunk is in memory at a time.

    Nothing in the directory is run: of its pickles only the values are taken, every name in them is on a short list and stands for
    an inert record. Files are opened by their plain name in the directory, without following links.

    Args:
        source: the directory with `.metadata`.
        root: where the steps of a run lie.
        step: updates so far; by default the largest `step` of the optimizer's state, else a value `step`, else 0.
        model: key of the model in the state dict that was saved; by default `model`, else `state_dict`, else its tensors stand at the top.
        optimizer: class of the optimizer, where its options do not tell.
        buffers: patterns of names that are buffers. Whole numbers and statistics of batch norms are known.
        tied: alias -> name, of parameters that are one in the model: the state dict has both, and they must have equal bits.
        order: names of the parameters in the order in which the optimizer was given them, where it numbers them.
        skip: patterns of keys that are left out.
        checksum: of what is written.
        progress: called with the bytes done and their total.

    Raises:
        CheckpointError: it is no such checkpoint, damaged, holds more than tensors and plain values, or the step exists. Nothing is
            committed then.
    """
    require_little_endian()
    place = Path(source).absolute()
    wishes = Wishes(model, optimizer, tuple(buffers), dict(tied or {}), None if order is None else tuple(order))
    with DcpFiles(place) as files:
        entries = read_entries(files)
        skipped = tuple(key for key in entries if any(matches(pattern, key) for pattern in skip))
        kept = [entry for key, entry in entries.items() if key not in skipped]
        reader = _Reads(files, progress)
        arranged = arrange(Source(str(place), kept, reader.value, reader.number), wishes)
        for alias, name in wishes.tied.items():
            _require_equal(reader, alias, arranged.aliases[alias], name, arranged.model[name])
        number = _step(step, arranged, reader)
        pieces = list(_pieces(arranged, reader))
        reader.total = sum(piece.length for piece in pieces)
        part = begin(root, number)
        try:
            records = write_data(part, data_file(0), [piece.piece for piece in pieces], checksum=checksum)
            path = commit(part, records, _values(arranged, wishes.tied, number), checksum=checksum)
        except BaseException:
            discard(part)
            raise
    return Imported(
        path=path,
        step=number,
        parameters=tuple(sorted(arranged.model.keys() - arranged.buffers)),
        buffers=tuple(sorted(arranged.buffers)),
        optimizer=arranged.optimizer["class"] if arranged.optimizer else None,
        scheduler=arranged.scheduler is not None,
        rest=(*arranged.rest, *arranged.opaque),
        skipped=skipped,
        alike=tuple(_alike(records)),
    )


class _Reads:
    """Reads of entries, counted."""

    def __init__(self, files: DcpFiles, progress: Callable[[int, int], None] | None) -> None:
        self._files, self._progress = files, progress
        self.done, self.total = 0, 0

    def where(self, place: Place, key: str) -> str:
        return f"{self._files.path / place.file}: {key}"

    def value(self, entry: DcpValue) -> Any:
        return read_value(self._files.read(entry.place), self.where(entry.place, entry.key))

    def chunk(self, entry: DcpTensor, chunk: DcpChunk) -> torch.Tensor:
        found = read_tensor(self._files.read(chunk.place), self.where(chunk.place, entry.key), entry.dtype, chunk.size)
        self.done += chunk.place.length
        if self._progress is not None and self.total:
            self._progress(self.done, self.total)
        return found

    def number(self, entry: DcpTensor) -> float:
        return float(self.chunk(entry, entry.chunks[0]))


@attrs.frozen(eq=False)
class _Counted:
    piece: Piece
    length: int


def _pieces(arranged: Arranged, reader: _Reads) -> Iterable[_Counted]:
    tensors: list[tuple[str, str | None, DcpTensor]] = [
        *((name, _BUFFER if name in arranged.buffers else _PARAMETER, tensor) for name, tensor in arranged.model.items()),
        *arranged.state,
        *((f"imported/{key}", None, tensor) for key, tensor in arranged.opaque.items()),
    ]
    for name, kind, tensor in tensors:
        for chunk in tensor.chunks:
            read = partial(reader.chunk, tensor, chunk)
            piece = Piece(name, kind, tensor.shape, chunk.offset, read, size=chunk.size, dtype=tensor.dtype)
            yield _Counted(piece, chunk.place.length)
    for name, kind, value in arranged.numbers:
        yield _Counted(Piece(name, kind, (), (), torch.tensor(value, dtype=torch.float32)), 0)


def _values(arranged: Arranged, tied: Mapping[str, str], step: int) -> dict[str, Any]:
    names = sorted(arranged.model.keys() - arranged.buffers)
    return {
        "parameters": {
            name: {
                "shape": list(arranged.model[name].shape),
                "dtype": str(arranged.model[name].dtype).removeprefix("torch."),
                "aliases": sorted(alias for alias, same in tied.items() if same == name),
            }
            for name in names
        },
        "imported from": _FROM,
        "geometry": {"imported from": _FROM},  # that of no ranks: generators start anew, by the rule for another plan
        "step": step,
        "session": {},
        "metadata": {"imported": dict(arranged.rest)} if arranged.rest else None,
        "optimizers": {_PATTERN: dict(arranged.optimizer)} if arranged.optimizer else {},
        "optimizer values": dict(arranged.values),
        "schedulers": {} if arranged.scheduler is None else {_PATTERN: dict(arranged.scheduler)},
        "own": {},
    }


def _step(given: int | None, arranged: Arranged, reader: _Reads) -> int:
    if given is not None:
        return given
    found = [reader.number(tensor) for _, kind, tensor in arranged.state if kind == "step" and tensor.shape in ((), (1,))]
    found += [value for _, kind, value in arranged.numbers if kind == "step"]
    found = [value for value in found if value >= 0 and value.is_integer()]
    if found:
        return int(max(found))
    said = arranged.rest.get("step")
    return said if type(said) is int and said >= 0 else 0


def _require_equal(reader: _Reads, alias: str, one: DcpTensor, name: str, other: DcpTensor) -> None:
    """Chunk by chunk: a tied pair is saved with the same cuts."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype) and len(one.chunks) == len(other.chunks)
    by_offset = {chunk.offset: chunk for chunk in other.chunks}
    for chunk in one.chunks if alike else ():
        twin = by_offset.get(chunk.offset)
        alike = (
            alike
            and twin is not None
            and twin.size == chunk.size
            and torch.equal(_bits(reader.chunk(one, chunk)), _bits(reader.chunk(other, twin)))
        )
    if not alike:
        raise CheckpointError(
            f"{alias} and {name} are said to be tied, and differ in the checkpoint; expected equal bits; way out: import both, into a "
            "model that has both"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _alike(records: Iterable[Record]) -> Iterable[tuple[str, str]]:
    """Pairs of parameters of which every chunk has the same checksum."""
    chunks: dict[str, list[Any]] = {}
    for record in records:
        if record.kind == _PARAMETER and len(record.shape) > 1:  # norms and biases are often all ones or zeros
            chunks.setdefault(record.name, []).append((record.shape, record.dtype, record.offset, record.size, record.checksum))
    first: dict[Any, str] = {}
    for name, found in sorted(chunks.items()):
        seen = first.setdefault(repr(sorted(found)), name)
        if seen != name:
            yield seen, name


def tied_pair(text: str) -> tuple[str, str]:
    """`ALIAS=NAME` as a pair of names.

    Raises:
        CheckpointError: it is none.
    """
    alias, equals, name = text.partition("=")
    if not (alias and equals and name):
        raise CheckpointError(f"{text!r}: no pair of names; expected ALIAS=NAME, such as lm_head.weight=model.embed_tokens.weight")
    return logical_name(alias), logical_name(name)

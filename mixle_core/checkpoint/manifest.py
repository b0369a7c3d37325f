"""What a checkpoint says of itself: `metadata.json` and `_SUCCESS`, written in one form, believed only after every field was checked."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import attrs
import torch

from mixle_core.checkpoint.coverage import covers
from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.files import METADATA, SUCCESS, is_data_file
from mixle_core.checkpoint.shards import CHECKSUMS, DTYPES, MAX_DIMS, Record
from mixle_core.checkpoint.values import decode, dump_json, encode, parse_json

FORMAT = 1
"""Of what is written; this is the only one that is read."""

MAX_SUCCESS_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 2**32

_SUMS = {"crc32": re.compile("[0-9a-f]{8}"), "sha256": re.compile("[0-9a-f]{64}")}
_SHA256 = _SUMS["sha256"]
_SIZES_BELOW = 2**62


class Chunk(NamedTuple):
    """Where a block of a whole tensor lies: its place in the tensor, then file, first byte, bytes and checksum."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    begin: int
    length: int
    checksum: str


@attrs.frozen
class Stored:
    """One whole tensor.

    Args:
        dtype: its name, such as "bfloat16".
        chunks: disjoint blocks that together are the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@attrs.frozen
class Success:
    """What `_SUCCESS` says.

    Args:
        checksum: of the chunks: "crc32" or "sha256".
        metadata_size: of metadata.json, in bytes, and `metadata_sha256` its sha256.
        files: bytes of every data file.
        versions: of the packages that wrote it.
    """

    step: int
    checksum: str
    metadata_size: int
    metadata_sha256: str
    files: Mapping[str, int]
    versions: Mapping[str, str]


@attrs.frozen
class Metadata:
    """What `metadata.json` says.

    Args:
        tensors: by name, then by kind.
        opaque: tensors that are read whole, by key.
        values: everything that is no tensor, by key.
    """

    tensors: Mapping[str, Mapping[str, Stored]]
    opaque: Mapping[str, Stored]
    values: Mapping[str, Any]

    def chunks(self) -> Iterable[tuple[str, str | None, Stored, Chunk]]:
        """Every chunk with the name, the kind (None for opaque) and the record of its tensor."""
        for name, kinds in self.tensors.items():
            for kind, stored in kinds.items():
                yield from ((name, kind, stored, chunk) for chunk in stored.chunks)
        for key, stored in self.opaque.items():
            yield from ((key, None, stored, chunk) for chunk in stored.chunks)


def metadata_bytes(records: Iterable[Record], values: Mapping[str, Any]) -> bytes:
    """`metadata.json` of what was written.

    Raises:
        CheckpointError: a value that cannot be stored, or records of one tensor with different shapes or dtypes.
    """
    tensors: dict[str, dict[str, Any]] = {}
    opaque: dict[str, Any] = {}
    for record in records:
        place, key = (opaque, record.name) if record.kind is None else (tensors.setdefault(record.name, {}), record.kind)
        entry = place.setdefault(key, {"dtype": record.dtype, "shape": list(record.shape), "chunks": []})
        if (entry["dtype"], entry["shape"]) != (record.dtype, list(record.shape)):
            raise CheckpointError(
                f"{record.name} ({record.kind or 'opaque'}): {record.file} has it as {record.dtype} {list(record.shape)}, another file as "
                f"{entry['dtype']} {entry['shape']}; expected one shape and dtype; way out: save the same model on every rank"
            )
        entry["chunks"].append([list(record.offset), list(record.size), record.file, record.begin, record.length, record.checksum])
    for key in values:
        if type(key) is not str:
            raise CheckpointError(f"values: a key of type {type(key).__name__}; expected str; way out: name every value")
    encoded = {key: encode(value, key) for key, value in values.items()}
    for key in encoded:
        encode(key, repr(key))
    return dump_json({"tensors": tensors, "opaque": opaque, "values": encoded})


def success_bytes(success: Success) -> bytes:
    """`_SUCCESS`: one line of JSON, and one with the sha256 of that line."""
    body = dump_json(
        {
            "format": FORMAT,
            "step": success.step,
            "checksum": success.checksum,
            "metadata": {"size": success.metadata_size, "sha256": success.metadata_sha256},
            "files": dict(success.files),
            "versions": dict(success.versions),
        }
    )
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def parse_success(data: bytes, where: str) -> Success:
    """Read `_SUCCESS`, believing nothing.

    Raises:
        CheckpointError: it is not exactly what a save of this format writes.
    """
    lines = data.split(b"\n")
    if len(lines) != 3 or lines[2] or hashlib.sha256(lines[0]).hexdigest().encode() != lines[1]:
        refuse(where, "it differs from its own sha256", "one line of JSON and one with the sha256 of that line")
    found = parse_json(lines[0], where)
    check = _Check(where)
    if type(found) is dict and type(found.get("format")) is int and found["format"] != FORMAT:
        way_out = "update mixle-core" if found["format"] > FORMAT else "load another step"
        refuse(where, f"format {found['format']}", f"format {FORMAT}", way_out)
    check.fields(found, ("format", "step", "checksum", "metadata", "files", "versions"), "_SUCCESS")
    check.size(found["format"], "format")
    check.size(found["step"], "step")
    if found["checksum"] not in CHECKSUMS:
        check.wrong("checksum", found["checksum"], f"one of {', '.join(CHECKSUMS)}")
    check.fields(found["metadata"], ("size", "sha256"), "metadata")
    check.size(found["metadata"]["size"], "metadata.size")
    if type(found["metadata"]["sha256"]) is not str or not _SHA256.fullmatch(found["metadata"]["sha256"]):
        check.wrong("metadata.sha256", found["metadata"]["sha256"], "a sha256")
    for name, size in check.mapping(found["files"], "files"):
        if not is_data_file(name):
            check.wrong("files", name, "names such as data-00000-000.safetensors")
        check.size(size, f"files.{name}")
    for name, version in check.mapping(found["versions"], "versions"):
        if type(version) is not str:
            check.wrong(f"versions.{name}", version, "text")
        check.text(name, "versions")
        check.text(version, f"versions.{name}")
    return Success(
        step=found["step"], checksum=found["checksum"], metadata_size=found["metadata"]["size"],
        metadata_sha256=found["metadata"]["sha256"], files=found["files"], versions=found["versions"],
    )  # fmt: skip


def parse_metadata(data: bytes, success: Success, where: str) -> Metadata:
    """Read `metadata.json`, believing nothing.

    Every chunk is inside its tensor, the chunks of a tensor are the tensor exactly, and the chunks of a file fill it exactly.

    Raises:
        CheckpointError: it is not exactly what a save of this format writes.
    """
    if (len(data), hashlib.sha256(data).hexdigest()) != (success.metadata_size, success.metadata_sha256):
        refuse(where, f"{len(data)} bytes with another sha256", f"the {success.metadata_size} bytes that {SUCCESS} names")
    found = parse_json(data, where)
    check = _Check(where)
    check.fields(found, ("tensors", "opaque", "values"), METADATA)
    tensors: dict[str, dict[str, Stored]] = {}
    for name, kinds in check.mapping(found["tensors"], "tensors"):
        check.name(name, "tensors")
        tensors[name] = {}
        for kind, entry in check.mapping(kinds, name):
            check.name(kind, name)
            tensors[name][kind] = check.stored(entry, f"{name} ({kind})", success)
        if not kinds:
            check.wrong(name, kinds, "at least one kind")
    opaque: dict[str, Stored] = {}
    for key, entry in check.mapping(found["opaque"], "opaque"):
        check.name(key, "opaque")
        opaque[key] = check.stored(entry, key, success)
    values: dict[str, Any] = {}
    for key, value in check.mapping(found["values"], "values"):
        check.text(key, "values")
        values[key] = decode(value, f"{where}: values, {key}")
    metadata = Metadata(tensors, opaque, values)
    _require_full(metadata, success, where)
    return metadata


def _require_full(metadata: Metadata, success: Success, where: str) -> None:
    """The chunks of every file follow each other without gap or overlap, up to its last byte."""
    by_file: dict[str, list[tuple[int, int, str]]] = {name: [] for name in success.files}
    for name, _, _, chunk in metadata.chunks():
        by_file[chunk.file].append((chunk.begin, chunk.begin + chunk.length, name))
    for file, ranges in by_file.items():
        ranges.sort()
        if not ranges:
            refuse(where, f"no chunk in {file}", "some in every file")
        for (_, end, before), (begin, _, after) in itertools.pairwise(ranges):
            if end != begin:
                how = "overlap" if begin < end else "leave a gap"
                refuse(where, f"the bytes of {before} and {after} in {file} {how} at {min(begin, end)}", "one after the other")
        if ranges[-1][1] != success.files[file]:
            refuse(where, f"the last chunk in {file} ends at byte {ranges[-1][1]}", f"{success.files[file]}")


class _Check:
    """Exact types and fields of one file."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, place: str, found: Any, expected: str) -> NoReturn:
        text = repr(found)
        refuse(self.where, f"{place} is {text if len(text) <= 80 else text[:77] + '...'}", expected)

    def fields(self, found: Any, names: Sequence[str], place: str) -> None:
        if type(found) is not dict or set(found) != set(names):
            shown = sorted(found) if type(found) is dict else found
            self.wrong(place, shown, f"exactly the fields {', '.join(names)}")

    def mapping(self, found: Any, place: str) -> Iterable[tuple[str, Any]]:
        if type(found) is not dict:
            self.wrong(place, found, "an object")
        return found.items()

    def size(self, found: Any, place: str) -> None:
        if type(found) is not int or not 0 <= found < _SIZES_BELOW:
            self.wrong(place, found, "a whole number of at least 0")

    def text(self, found: str, place: str) -> None:
        try:
            found.encode()
        except UnicodeEncodeError:
            self.wrong(place, found, "Unicode text")

    def name(self, found: str, place: str) -> None:
        self.text(found, place)
        if not found:
            self.wrong(place, found, "names that are not empty")

    def sizes(self, found: Any, place: str) -> tuple[int, ...]:
        if type(found) is not list or len(found) > MAX_DIMS:
            self.wrong(place, found, "a list of sizes")
        for extent in found:
            if type(extent) is not int or not 0 <= extent < _SIZES_BELOW:
                self.wrong(place, found, "a list of sizes")
        return tuple(found)

    def stored(self, entry: Any, what: str, success: Success) -> Stored:
        self.fields(entry, ("dtype", "shape", "chunks"), what)
        dtype = DTYPES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
        if dtype is None:
            self.wrong(f"{what}: dtype", entry["dtype"], f"one of {', '.join(DTYPES)}")
        shape = self.sizes(entry["shape"], f"{what}: shape")
        # with zeros left out: torch multiplies the extents of an empty tensor too
        if math.prod(filter(None, shape)) * dtype.itemsize >= _SIZES_BELOW:
            self.wrong(f"{what}: shape", list(shape), "a tensor of less than 4 EiB")
        if type(entry["chunks"]) is not list or not entry["chunks"]:
            self.wrong(f"{what}: chunks", entry["chunks"], "a list of at least one chunk")
        chunks = tuple(self.chunk(chunk, what, success, dtype.itemsize) for chunk in entry["chunks"])
        problem = covers(shape, [(chunk.offset, chunk.size) for chunk in chunks])
        if problem:
            refuse(self.where, f"{what}: {problem}", "chunks that are the tensor exactly")
        return Stored(entry["dtype"], shape, chunks)

    def chunk(self, found: Any, what: str, success: Success, itemsize: int) -> Chunk:
        if type(found) is not list or len(found) != 6:
            self.wrong(f"{what}: a chunk", found, "[offset, size, file, begin, length, checksum]")
        offset, size = self.sizes(found[0], f"{what}: an offset"), self.sizes(found[1], f"{what}: a size")
        _, _, file, begin, length, checksum = found
        if type(file) is not str or file not in success.files:
            self.wrong(f"{what}: a file", file, f"one that {SUCCESS} names")
        self.size(begin, f"{what}: a first byte")
        self.size(length, f"{what}: a length")
        if length != math.prod(size) * itemsize:
            self.wrong(f"{what}: a length", length, f"{math.prod(size)} elements of {itemsize} bytes")
        if begin + length > success.files[file]:
            self.wrong(f"{what}: a chunk's last byte", begin + length, f"at most {success.files[file]}, the size of {file}")
        if type(checksum) is not str or not _SUMS[success.checksum].fullmatch(checksum):
            self.wrong(f"{what}: a checksum", checksum, f"a {success.checksum}")
        return Chunk(offset, size, file, begin, length, checksum)

"""The data of one entry: what torch.save wrote, with its CRC32 compared, as a tensor over the bytes or as plain values."""

from __future__ import annotations

import collections
import io
import struct
import zipfile
import zlib
from typing import Any, NoReturn

import attrs
import torch

from mixle_core.checkpoint._upstream import BYTES_RECORDS, TENSOR_RECORDS
from mixle_core.checkpoint.dcp_pickle import ENTRY_NAMES, Record, Storage, Untyped, read_pickle
from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.values import MAX_DEPTH, encode

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_WAY_OUT = "the file is damaged; or it was written with torch.serialization.set_crc32_options(False): save it again without"
_LEAVE_OUT = "leave the entry out with skip"
_SHARED = 4
"""Items of a value for each byte of its entry: no value that was written takes nearly as many."""
_REBUILDS = {name for _, name in TENSOR_RECORDS}
_ENCODES = {name for _, name in BYTES_RECORDS}


@attrs.frozen(eq=False)
class _Archive:
    """A zip archive in memory, of which only stored parts are read."""

    data: bytearray
    where: str
    prefix: str
    parts: dict[str, tuple[int, int, int]]

    def part(self, name: str) -> tuple[int, int]:
        """First byte and length, once the CRC32 was compared."""
        if name not in self.parts:
            refuse(self.where, f"no {name} in it", "what torch.save writes", _WAY_OUT)
        begin, length, crc = self.parts[name]
        if zlib.crc32(memoryview(self.data)[begin : begin + length]) != crc:
            refuse(self.where, f"the CRC32 of {name} is another", f"{crc:08x}", _WAY_OUT)
        return begin, length

    def small(self, name: str) -> bytes:
        begin, length = self.part(name)
        return bytes(memoryview(self.data)[begin : begin + length])


class _View(io.RawIOBase):
    """A file over memory, so that the directory of an archive is read without a copy of its contents."""

    def __init__(self, data: bytearray) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        end = len(self._data) if size < 0 else min(len(self._data), self._at + size)
        found = bytes(memoryview(self._data)[self._at : end])
        self._at += len(found)
        return found


def _archive(data: bytearray, where: str) -> _Archive:
    try:
        with zipfile.ZipFile(_View(data)) as opened:
            listed = opened.infolist()
    except Exception as error:  # a damaged directory raises nearly anything
        text = " ".join(str(error).split())[:100]
        raise CheckpointError(f"{where}: nothing that torch.save wrote ({text}); way out: {_WAY_OUT}", path=where) from error
    pickled = [entry.filename for entry in listed if entry.filename.endswith("/data.pkl") and entry.filename.count("/") == 1]
    if len(pickled) != 1 or len({entry.filename for entry in listed}) != len(listed):
        refuse(where, f"{len(pickled)} pickles", "one, and every part once", _WAY_OUT)
    prefix = pickled[0].removesuffix("data.pkl")
    parts = {}
    for entry in listed:
        head = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
        if len(head) != _LOCAL_HEADER.size or head[:4] != b"PK\x03\x04":
            refuse(where, f"no header of {entry.filename}", "an archive as torch.save writes it", _WAY_OUT)
        _, name_length, extra_length = _LOCAL_HEADER.unpack(head)
        begin = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        plain = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size and not entry.flag_bits & 1
        if not plain or begin + entry.file_size > len(data):
            refuse(where, f"{entry.filename} is not stored as it is", "an archive as torch.save writes it", _WAY_OUT)
        parts[entry.filename.removeprefix(prefix)] = begin, entry.file_size, entry.CRC
    archive = _Archive(data, where, prefix, parts)
    if "byteorder" in parts and archive.small("byteorder") != b"little":
        refuse(where, "big-endian values", "little-endian", "save it on another machine")
    return archive


def read_tensor(data: bytearray, where: str, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """The tensor of an entry, in the memory of `data`.

    Args:
        dtype, size: that it must have.

    Raises:
        CheckpointError: it is no tensor, another one, or damaged.
    """
    archive = _archive(data, where)
    found = _unpickled(archive)
    if not isinstance(found, Record) or type(found).__name__ not in _REBUILDS:
        refuse(where, f"a {type(found).__name__}", "a tensor", _WAY_OUT)
    return _tensor(archive, found, dtype, size)


def read_value(data: bytearray, where: str) -> Any:
    """The plain value of an entry.

    Raises:
        CheckpointError: it is no plain value, or damaged.
    """
    value = _plain(_unpickled(_archive(data, where)), where, 0, _Budget(_SHARED * len(data)))
    encode(value, where)
    return value


def _unpickled(archive: _Archive) -> Any:
    return read_pickle(archive.small("data.pkl"), ENTRY_NAMES, archive.where, Storage)


def _tensor(archive: _Archive, found: Record, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    def wrong(what: str, expected: str) -> NoReturn:
        refuse(archive.where, what, expected, _WAY_OUT)

    arguments = found.arguments
    third = type(found).__name__ == "_rebuild_tensor_v3"
    if len(arguments) < 6 + third or arguments[5] != {} or any(arguments[6 + third :]):
        wrong("a tensor with hooks or marks", "a plain one")
    storage, start, extents, strides = arguments[:4]
    pid = storage.arguments[0] if isinstance(storage, Storage) else None
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[2]) is not str or type(pid[4]) is not int:
        wrong("a tensor without a storage", "one")
    kind, number = pid[1], pid[4]
    held = (arguments[6] if third else None) if kind is Untyped else kind
    if held != dtype or type(extents) not in (tuple, torch.Size) or tuple(extents) != size:
        wrong(f"a {held} tensor of shape {extents}", f"{dtype} of shape {size}")
    if type(start) is not int or type(strides) is not tuple or len(strides) != len(size) or not all(type(one) is int for one in strides):
        wrong("a tensor with odd strides", "whole numbers")
    begin, length = archive.part(f"data/{pid[2]}")
    elements = length // dtype.itemsize
    last = start + sum((extent - 1) * stride for extent, stride in zip(size, strides, strict=True))
    if length != number * (1 if kind is Untyped else dtype.itemsize) or (
        0 not in size and (start < 0 or min(strides, default=0) < 0 or last >= elements)
    ):
        wrong(f"a tensor of shape {list(size)} in {length} bytes", "a storage that holds it")
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    flat = torch.frombuffer(archive.data, dtype=dtype, count=elements, offset=begin)
    return flat.as_strided(size, strides, start)


class _Budget:
    """How many items a value may have: a few bytes that refer to each other can stand for more than any memory holds."""

    def __init__(self, items: int) -> None:
        self._left = items

    def take(self, where: str, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > MAX_DEPTH:
            text = f"{where}: nested more than {MAX_DEPTH} deep, in a cycle, or the same parts many times over"
            raise CheckpointError(f"{text}; way out: {_LEAVE_OUT}", path=where)


def _plain(found: Any, where: str, depth: int, budget: _Budget) -> Any:
    """Records for bytes resolved, ordered dicts as dicts; what cannot be stored is left for `encode` to refuse."""
    budget.take(where, depth)
    kind = type(found)
    if isinstance(found, Record):
        text = found.arguments
        if kind.__name__ in _ENCODES and len(text) == 2 and type(text[0]) is str and text[1] == "latin1":
            return _latin1(text[0], where)
        what = "a tensor inside a value" if kind.__name__ in _REBUILDS else f"a {kind.__name__}"
        raise CheckpointError(f"{where}: {what}; expected plain values; way out: {_LEAVE_OUT}", path=where)
    if kind is dict or kind is collections.OrderedDict:
        pairs = dict.items(found)  # an attribute of that name may have been set on an ordered one
        return {_plain(key, where, depth + 1, budget): _plain(value, where, depth + 1, budget) for key, value in pairs}
    if kind is list or kind is tuple:
        return kind(_plain(item, where, depth + 1, budget) for item in found)
    if isinstance(found, type):
        raise CheckpointError(f"{where}: a type; expected plain values; way out: {_LEAVE_OUT}", path=where)
    return found


def _latin1(text: str, where: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where}: bytes above 255; way out: {_WAY_OUT}", path=where) from error

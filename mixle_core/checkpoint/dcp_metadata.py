"""`.metadata` of torch.distributed.checkpoint: which entries there are, and where their bytes lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn, Self

import attrs
import torch

from mixle_core.checkpoint.coverage import covers
from mixle_core.checkpoint.dcp_pickle import METADATA_NAMES, Record, read_pickle
from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.files import directory, open_regular, os_errors, read_small
from mixle_core.checkpoint.shards import DTYPES, MAX_DIMS

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 2**32
_OPEN_FILES = 16
_WAY_OUT = "the checkpoint is damaged, or no stock one of torch.distributed.checkpoint"

Keys = tuple[str | int, ...]


@attrs.frozen
class Place:
    """Where the bytes of an entry, or of a chunk of it, lie."""

    file: str
    begin: int
    length: int


@attrs.frozen
class DcpChunk:
    """A block of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    place: Place


@attrs.frozen
class DcpTensor:
    """A tensor.

    Args:
        key: its name in the checkpoint.
        path: the keys of the nested state dict that lead to it; a list's are numbers.
    """

    key: str
    path: Keys
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@attrs.frozen
class DcpValue:
    """Something that is no tensor."""

    key: str
    path: Keys
    place: Place


DcpEntry = DcpTensor | DcpValue


class DcpFiles:
    """An open directory of a checkpoint: regular files in it, by plain names, no link followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = ExitStack()
        self._parent = self._stack.enter_context(directory(path))
        self._open: dict[str, tuple[int, int]] = {}

    def metadata(self) -> bytes:
        """The bytes of `.metadata`."""
        try:
            return read_small(self._parent, METADATA_FILE, self.path, size=None, limit=MAX_METADATA_BYTES)
        except CheckpointError as error:
            if not error.errno.startswith("ENOENT"):
                raise
            where = str(self.path / METADATA_FILE)
            text = (
                f"{where}: missing; expected a directory that torch.distributed.checkpoint.save wrote; files such as __0.metadata are no "
            )
            raise CheckpointError(text + "substitute; way out: give the directory with .metadata", path=where, errno=error.errno) from error

    def require(self, place: Place, what: str) -> None:
        """Check that the bytes are there, before anything is allocated."""
        name = place.file
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            refuse(f"{self.path}: {what}", f"it lies in {name!r}", "a file of the directory itself, by its name", _WAY_OUT)
        _, size = self._descriptor(name)
        if place.begin + place.length > size:
            refuse(str(self.path / name), f"{size} bytes", f"at least {place.begin + place.length}, for {what}", _WAY_OUT)

    def read(self, place: Place) -> bytearray:
        """The bytes of an entry."""
        descriptor, _ = self._descriptor(place.file)
        found = bytearray(place.length)
        view, begin = memoryview(found), place.begin
        with os_errors("could not be read", self.path / place.file):
            while view:
                number = os.preadv(descriptor, [view], begin)
                if not number:
                    refuse(str(self.path / place.file), f"it ends at byte {begin}", f"{place.begin + place.length}", _WAY_OUT)
                view, begin = view[number:], begin + number
        return found

    def _descriptor(self, name: str) -> tuple[int, int]:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open)))[0])
            self._open[name] = open_regular(self._parent, name, self.path)
        return self._open[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._open.values():
            os.close(opened[0])
        self._open.clear()
        self._stack.close()


def read_entries(files: DcpFiles) -> dict[str, DcpEntry]:
    """Every entry by key, in the order of the state dict where it is known. Shapes, chunks, files and sizes are checked.

    Raises:
        CheckpointError: anything else than a stock checkpoint.
    """
    where = str(files.path / METADATA_FILE)
    reader = _Reader(where)
    found = reader.fields(read_pickle(files.metadata(), METADATA_NAMES, where), "Metadata")
    described = reader.mapping(found.get("state_dict_metadata"), "state_dict_metadata")
    places = reader.places(found.get("storage_data"))
    paths = reader.paths(found.get("planner_data"))
    order = [*(key for key in paths if key in described), *(key for key in described if key not in paths)]
    entries: dict[str, DcpEntry] = {}
    for key in order:
        entry = reader.entry(key, described[key], paths.get(key, (key,)), places)
        for place in [entry.place] if isinstance(entry, DcpValue) else [chunk.place for chunk in entry.chunks]:
            files.require(place, key)
        entries[key] = entry
    return entries


class _Reader:
    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, what: str, found: Any, expected: str) -> NoReturn:
        name = type(found).__name__ if isinstance(found, Record) else repr(found)
        refuse(self.where, f"{what} is {name if len(name) <= 80 else name[:77] + '...'}", expected, _WAY_OUT)

    def fields(self, found: Any, kind: str) -> dict[str, Any]:
        if not isinstance(found, Record) or type(found).__name__ != kind or type(found.state) is not dict:
            self.wrong("an object", found, f"a {kind}")
        return found.state

    def mapping(self, found: Any, what: str) -> dict[str, Any]:
        if type(found) is not dict or not all(type(key) is str for key in found):
            self.wrong(what, found, "a dict with keys of text")
        return found

    def whole(self, found: Any, what: str) -> int:
        if type(found) is not int or not 0 <= found < 2**62:
            self.wrong(what, found, "a whole number of at least 0")
        return found

    def sizes(self, found: Any, what: str) -> tuple[int, ...]:
        if type(found) not in (tuple, list, torch.Size) or len(found) > MAX_DIMS:
            self.wrong(what, found, "sizes")
        return tuple(self.whole(extent, what) for extent in found)

    def places(self, found: Any) -> dict[tuple[str, tuple[int, ...] | None], Place]:
        if type(found) is not dict:
            self.wrong("storage_data", found, "a dict")
        places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for index, info in found.items():
            key, stored = self.fields(index, "MetadataIndex"), self.fields(info, "_StorageInfo")
            name, file = key.get("fqn"), stored.get("relative_path")
            if type(name) is not str or type(file) is not str:
                self.wrong("an entry of storage_data", name, "a name with a file")
            if stored.get("transform_descriptors"):
                self.wrong(f"{name}: transform_descriptors", stored["transform_descriptors"], "none: data that was written as it is")
            offset = key.get("offset")
            at = (name, None if offset is None else self.sizes(offset, f"{name}: an offset"))
            if at in places:
                self.wrong(f"the place of {name}", at[1], "one for each chunk")
            places[at] = Place(file, self.whole(stored.get("offset"), f"{name}: a first byte"), self.whole(stored.get("length"), name))
        return places

    def paths(self, found: Any) -> dict[str, Keys]:
        if found is None:
            return {}
        for key, path in self.mapping(found, "planner_data").items():
            if type(path) is not tuple or not path or not all(type(part) in (str, int) for part in path):
                self.wrong(f"planner_data of {key}", path, "a tuple of keys")
        return dict(found)

    def entry(self, key: str, described: Any, path: Keys, places: Mapping[tuple[str, tuple[int, ...] | None], Place]) -> DcpEntry:
        kind = type(described).__name__
        if kind == "BytesStorageMetadata" and isinstance(described, Record):
            place = places.get((key, None))
            if place is None:
                self.wrong(f"the place of {key}", None, "one")
            return DcpValue(key, path, place)
        fields = self.fields(described, "TensorStorageMetadata")
        properties = fields.get("properties")
        state = properties.state if isinstance(properties, Record) and type(properties).__name__ == "TensorProperties" else None
        dtype: Any = state[0] if type(state) is tuple and state else None
        if dtype not in DTYPES.values():
            self.wrong(f"the dtype of {key}", dtype, f"one of {', '.join(DTYPES)}")
        shape = self.sizes(fields.get("size"), f"the size of {key}")
        if type(fields.get("chunks")) is not list or not fields["chunks"]:
            self.wrong(f"the chunks of {key}", fields.get("chunks"), "a list")
        chunks = []
        for chunk in fields["chunks"]:
            said = self.fields(chunk, "ChunkStorageMetadata")
            offset, size = self.sizes(said.get("offsets"), f"an offset of {key}"), self.sizes(said.get("sizes"), f"a size of {key}")
            place = places.get((key, offset))
            if place is None:
                self.wrong(f"the place of {key} at {list(offset)}", None, "one for each chunk")
            chunks.append(DcpChunk(offset, size, place))
        full = [chunk for chunk in chunks if 0 not in chunk.size] or chunks[:1]
        problem = covers(shape, [(chunk.offset, chunk.size) for chunk in full])
        if problem:
            refuse(self.where, f"{key}: {problem}", "chunks that are the tensor exactly", _WAY_OUT)
        return DcpTensor(key, path, dtype, shape, tuple(full))

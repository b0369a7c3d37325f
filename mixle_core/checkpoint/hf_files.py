"""Safetensors files of transformers: a file, or several with an index, mapped and read by blocks. They have no checksums."""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from mixle_core.checkpoint.errors import refuse
from mixle_core.checkpoint.files import os_errors
from mixle_core.checkpoint.hf import INDEX, SAFETENSORS, WEIGHTS
from mixle_core.checkpoint.shards import DTYPES, MAX_DIMS, require_little_endian
from mixle_core.checkpoint.values import parse_json

_DTYPES = {name: DTYPES[dtype] for dtype, name in SAFETENSORS.items()}

MAX_HEADER_BYTES = 100 * 10**6
"""As the library safetensors has it."""
MAX_INDEX_BYTES = 2**30


@attrs.frozen
class Weight:
    """One tensor: its dtype and shape, and where its bytes lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    begin: int


class HfWeights:
    """The weights of a local transformers directory, by name. Every size is checked against the files; there is nothing else to check.

    Args:
        path: with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names. Links are followed, since the
            cache of transformers is made of them; names with a directory in them are refused.

    Raises:
        CheckpointError: neither, or a file that is not exactly what its header says.
    """

    def __init__(self, path: Path | str) -> None:
        require_little_endian()
        self.path = Path(path).absolute()
        self._maps: dict[str, mmap.mmap] = {}
        self.weights: Mapping[str, Weight] = {}
        try:
            self.weights = self._read()
        except BaseException:
            self.close()
            raise

    def block(self, name: str, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """A view of one block in the mapped file: what is not copied from it is not read. Not to be written to."""
        weight = self.weights[name]
        if not math.prod(weight.shape):
            return torch.empty(size, dtype=weight.dtype)
        number = math.prod(weight.shape)
        found = torch.frombuffer(self._maps[weight.file], dtype=weight.dtype, count=number, offset=weight.begin).view(weight.shape)
        for dim, (start, extent) in enumerate(zip(offset, size, strict=True)):
            found = found.narrow(dim, start, extent)
        return found

    def close(self) -> None:
        """Let go of the files; the system unmaps each when the last view of it is gone."""
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Weight]:
        if (self.path / WEIGHTS).is_file() or not (self.path / INDEX).is_file():
            return self._header(WEIGHTS)
        place = str(self.path / INDEX)
        index = parse_json(self._small(INDEX), place)
        named = index.get("weight_map") if type(index) is dict else None
        if type(named) is not dict or not named or not all(type(file) is str for file in named.values()):
            refuse(place, "no weight_map", "the name of a file for each tensor", _WAY_OUT)
        files = sorted(set(named.values()))
        for file in files:
            if "/" in file or "\0" in file or not file.endswith(".safetensors"):
                refuse(place, f"the file {file!r}", "safetensors files of the directory itself, by name", _WAY_OUT)
        found: dict[str, Weight] = {}
        for file in files:
            here = self._header(file)
            odd = sorted(here.keys() ^ {name for name, other in named.items() if other == file})
            if odd:
                what = f"{odd[0]} is {'there and not in the index' if odd[0] in here else 'in the index and not there'}"
                refuse(str(self.path / file), what, "the tensors that the index names", _WAY_OUT)
            found |= here
        return found

    def _small(self, name: str) -> bytes:
        with os_errors("could not be read", self.path / name):
            size = (self.path / name).stat().st_size
            if size > MAX_INDEX_BYTES:
                refuse(str(self.path / name), f"{size} bytes", f"at most {MAX_INDEX_BYTES}", _WAY_OUT)
            return (self.path / name).read_bytes()

    def _header(self, file: str) -> dict[str, Weight]:
        place = str(self.path / file)
        with os_errors("could not be opened", place):
            descriptor = os.open(self.path / file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size < 8:
                refuse(place, "no regular file with a header", "a safetensors file", _WAY_OUT)
            with os_errors("could not be mapped", place):
                # private and writable, since torch has no read-only tensors; nothing writes to it
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        self._maps[file] = mapped
        length = int.from_bytes(mapped[:8], "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, len(mapped) - 8):
            refuse(place, f"a header of {length} bytes", f"at most {len(mapped) - 8}, in a file of {len(mapped)}", _WAY_OUT)
        said = parse_json(bytes(mapped[8 : 8 + length]), place)
        if type(said) is not dict:
            refuse(place, "a header that is no object", "names and places of tensors", _WAY_OUT)
        found, ranges = {}, []
        for name, entry in said.items():
            if name == "__metadata__":
                continue
            found[name], end = self._weight(place, file, name, entry, 8 + length)
            ranges.append((found[name].begin, end, name))
        ranges.sort()
        at = 8 + length
        for begin, end, name in ranges:
            if begin != at:
                refuse(place, f"{name} begins at byte {begin}", f"{at}, without gaps and overlaps", _WAY_OUT)
            at = end
        if at != len(mapped):
            refuse(place, f"{len(mapped)} bytes", f"{at}, as its header says", _WAY_OUT)
        return found

    def _weight(self, place: str, file: str, name: str, entry: Any, base: int) -> tuple[Weight, int]:
        fields = ("dtype", "shape", "data_offsets")
        if type(entry) is not dict or set(entry) != set(fields):
            refuse(place, f"{name} has other fields", f"exactly {', '.join(fields)}", _WAY_OUT)
        dtype = _DTYPES.get(entry["dtype"]) if type(entry["dtype"]) is str else None
        shape, offsets = entry["shape"], entry["data_offsets"]
        whole = all(type(extent) is int and 0 <= extent < 2**62 for sizes in (shape, offsets) if type(sizes) is list for extent in sizes)
        if dtype is None or type(shape) is not list or type(offsets) is not list or len(offsets) != 2 or len(shape) > MAX_DIMS or not whole:
            refuse(place, f"{name}: {str(entry)[:100]}", "a dtype that torch has, sizes, and two places", _WAY_OUT)
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize:
            refuse(place, f"{name} has {end - begin} bytes", f"{math.prod(shape) * dtype.itemsize} for {dtype} of shape {shape}", _WAY_OUT)
        return Weight(dtype, tuple(shape), file, base + begin), base + end


_WAY_OUT = "the file is damaged, or not whole: fetch it again"

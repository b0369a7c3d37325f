"""The weights of a committed step as files that transformers reads: safetensors, one or several with an index. No ranks, no pickle."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from mixle_core.checkpoint.catalogue import latest
from mixle_core.checkpoint.errors import CheckpointError, refuse
from mixle_core.checkpoint.files import BUFFER_BYTES, SUCCESS, directory, os_errors, random_suffix, write_all, write_durable
from mixle_core.checkpoint.manifest import Stored
from mixle_core.checkpoint.reader import Checkpoint, open_checkpoint
from mixle_core.checkpoint.shards import DTYPES, FORMATS, byte_view
from mixle_core.checkpoint.values import dump_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

SAFETENSORS = {name: FORMATS[dtype] for name, dtype in DTYPES.items()}
"""Name of a dtype -> its name in safetensors."""

_PARAMETER, _BUFFER = "parameter", "buffer"
_OWN_BUFFER = re.compile(r"buffer/(.+)/0")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What may stand beside weights and config, and is no program."""

# order in which safetensors lays dtypes out, the largest elements first
_RANK = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32",
    "C64", "F64", "I64", "U64",
)  # fmt: skip


@attrs.frozen
class Exported:
    """What an export wrote.

    Args:
        step: that it is of.
        names: of the tensors.
        files: those with weights.
        copied: other files, from `like`.
        dtype: that was written into config.json, where it said another.
    """

    path: Path
    step: int
    names: tuple[str, ...]
    files: tuple[str, ...]
    copied: tuple[str, ...]
    dtype: str | None


@attrs.frozen(eq=False)
class _Tensor:
    name: str
    kind: str
    stored: Stored
    read: Callable[[], torch.Tensor]


def export_hf(
    source: Path | str,
    out: Path | str,
    *,
    like: Path | str | None = None,
    max_shard_size: int | str = "50GB",
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the parameters and persistent buffers of a step as `save_pretrained` would: the same names, bytes and headers.

    Tied parameters stand once, under their first name, and from_pretrained ties them again; a head that was untied stands for
    itself. Names are those of the model in memory: for models that transformers stores under other names (fused experts, for
    example), they are not translated. One tensor is in memory at a time, and its checksums are compared.

    Args:
        source: directory of a step; or one with steps, of which the latest is taken.
        out: a directory that does not exist, or is empty. It appears whole, by one rename.
        like: local transformers directory; its config.json, tokenizer and generation config are copied, and no code. The config's dtype
            becomes that of the weights, as it would be in `save_pretrained`.
        max_shard_size: of a file, in bytes or such as "5GB"; a larger tensor gets a file of its own.
        progress: called with the bytes done and their total.

    Raises:
        CheckpointError: no such step, damaged, nothing in it that is a weight, or `out` has files. Nothing is at `out` then.
    """
    limit, place, final = _bytes_of(max_shard_size), _step_of(Path(source).absolute()), Path(out).absolute()
    _require_free(final)
    with open_checkpoint(place) as checkpoint:
        tensors = list(_tensors(checkpoint))
        if not tensors:
            refuse(str(place), "no parameter in it", "some", "export a step of a training")
        beside, dtype = _beside(None if like is None else Path(like), tensors)
        files = _shared_out(tensors, limit)
        with _attempt(final) as part, directory(part) as opened:
            count = _Count(sum(tensor.stored.num_bytes for tensor in tensors), progress)
            for name, members in files.items():
                _write(opened, part, name, members, count)
            if len(files) > 1:
                write_durable(opened, INDEX, part, _index(files, tensors))
            for name, data in beside.items():
                write_durable(opened, name, part, data)
        step = checkpoint.step
    return Exported(final, step, tuple(sorted(tensor.name for tensor in tensors)), tuple(files), tuple(beside), dtype)


def _step_of(place: Path) -> Path:
    if (place / SUCCESS).exists():
        return place
    found = latest(place)
    if found is None:
        refuse(str(place), "no step, and none in it is whole", "one", f"`mixle checkpoint list {place}` says why")
    return found


def _bytes_of(size: int | str) -> int:
    number: float = -1
    if isinstance(size, int):
        number = size
    elif found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)?\s*", size, re.IGNORECASE):
        number = float(found[1]) * _UNITS.get((found[2] or "").upper(), 1)
    if number < 1:
        raise CheckpointError(f"max_shard_size={size!r}; expected bytes, or such as 5GB; way out: use KB, MB, GB or TB")
    return int(number)


def _tensors(checkpoint: Checkpoint) -> Iterator[_Tensor]:
    """Parameters and persistent buffers, in the order of their names with numbers as numbers."""
    found: dict[str, _Tensor] = {}
    for name, kinds in checkpoint.metadata.tensors.items():
        for kind in (_PARAMETER, _BUFFER):
            if kind in kinds:
                stored = kinds[kind]
                found[name] = _Tensor(name, kind, stored, _reads(checkpoint, name, kind, stored))
    for key, stored in checkpoint.metadata.opaque.items():
        # a buffer that differed between ranks: what the first one has, as a load on other ranks takes it
        own = _OWN_BUFFER.fullmatch(key)
        if own and own[1] not in found:
            found[own[1]] = _Tensor(own[1], _BUFFER, stored, _reads_opaque(checkpoint, key))
    return iter(
        sorted(found.values(), key=lambda tensor: [(not s.isdigit(), int(s) if s.isdigit() else s) for s in tensor.name.split(".")])
    )


def _reads(checkpoint: Checkpoint, name: str, kind: str, stored: Stored) -> Callable[[], torch.Tensor]:
    return lambda: checkpoint.read(name, kind, (0,) * len(stored.shape), stored.shape)


def _reads_opaque(checkpoint: Checkpoint, key: str) -> Callable[[], torch.Tensor]:
    return lambda: checkpoint.opaque(key)


def _shared_out(tensors: Sequence[_Tensor], limit: int) -> dict[str, list[_Tensor]]:
    """File -> tensors: filled one after the other, a tensor above the limit alone."""
    shards: list[list[_Tensor]] = []
    current: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        number = tensor.stored.num_bytes
        if number > limit:
            shards.append([tensor])
            continue
        if current and size + number > limit:
            shards.append(current)
            current, size = [], 0
        current.append(tensor)
        size += number
    if current:
        shards.append(current)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{index:05d}-of-{len(shards):05d}.safetensors": members for index, members in enumerate(shards, 1)}


def _index(files: Mapping[str, Sequence[_Tensor]], tensors: Iterable[_Tensor]) -> bytes:
    tensors = list(tensors)
    document = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.stored.shape) for tensor in tensors if tensor.kind == _PARAMETER),
            "total_size": sum(tensor.stored.num_bytes for tensor in tensors),
        },
        "weight_map": {tensor.name: file for file, members in files.items() for tensor in members},
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


class _Count:
    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, number: int) -> None:
        self._done += number
        if self._progress is not None:
            self._progress(self._done, self._total)


def _write(opened: int, part: Path, name: str, members: Iterable[_Tensor], count: _Count) -> None:
    """One file, with the header that the library safetensors writes."""
    ordered = sorted(members, key=lambda tensor: (-_RANK.index(SAFETENSORS[tensor.stored.dtype]), tensor.name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        end = at + tensor.stored.num_bytes
        dtype, shape = SAFETENSORS[tensor.stored.dtype], list(tensor.stored.shape)
        entries[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = dump_json(entries)
    text += b" " * (-len(text) % 8)
    with os_errors("could not be written", part / name):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=opened)
        try:
            write_all(descriptor, memoryview(struct.pack("<Q", len(text)) + text))
            for tensor in ordered:
                data = byte_view(tensor.read())
                for start in range(0, len(data), BUFFER_BYTES):
                    write_all(descriptor, data[start : start + BUFFER_BYTES])
                count.add(len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _beside(like: Path | None, tensors: Iterable[_Tensor]) -> tuple[dict[str, bytes], str | None]:
    """Files to put beside the weights, and the dtype that the config did not say."""
    if like is None:
        return {}, None
    if not (like / CONFIG).is_file():
        refuse(str(like), f"no {CONFIG} in it", "a local transformers directory", "give the directory that the model was made from")
    found = {}
    for name in (CONFIG, *_BESIDE):
        # links are followed here: the cache of transformers is made of them
        with os_errors("could not be read", like / name):
            if (like / name).is_file():
                found[name] = (like / name).read_bytes()
    try:
        config = json.loads(found[CONFIG])
    except ValueError as error:
        raise CheckpointError(f"{like / CONFIG}: no JSON ({error}); way out: give another directory", path=str(like / CONFIG)) from error
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.stored.torch_dtype.is_floating_point:
            sizes[tensor.stored.dtype] = sizes.get(tensor.stored.dtype, 0) + tensor.stored.num_bytes
    dtype = max(sizes, key=lambda one: sizes[one]) if sizes else None
    if type(config) is not dict or dtype is None or config.get("dtype", config.get("torch_dtype")) == dtype:
        return found, None
    config.pop("torch_dtype", None)
    found[CONFIG] = (json.dumps({**config, "dtype": dtype}, indent=2, sort_keys=True) + "\n").encode()
    return found, dtype


def _require_free(final: Path) -> None:
    with os_errors("could not be looked into", final):
        try:
            status = final.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode) and not any(final.iterdir()):
            return
    refuse(str(final), "it exists, and is no empty directory", "nothing there: no file is ever replaced", "choose another directory")


@contextlib.contextmanager
def _attempt(final: Path) -> Iterator[Path]:
    """A private directory that becomes `final` by one rename, when all went well."""
    with os_errors("could not be made", final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(f"{final.name}.part-{random_suffix()}")
    with os_errors("could not be made", part):
        part.mkdir(mode=0o700)
    try:
        yield part
        with directory(part) as opened, os_errors("could not be made durable", part):
            os.fchmod(opened, final.parent.stat().st_mode & 0o777 | 0o700)
            os.fsync(opened)
        try:
            part.rename(final)  # a directory is replaced only while it is empty
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                _require_free(final)
            with os_errors(f"could not be renamed to {final.name}", part):
                raise
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    with directory(final.parent, follow=True) as opened, os_errors("could not be made durable", final.parent):
        os.fsync(opened)

"""What objects with a state dict say: plain values as they are, and tensors inside taken out, to be written as tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mixle_core.checkpoint import CheckpointError
from mixle_core.checkpoint.values import MAX_DEPTH

_TENSOR = "mixle tensor"
_WORDS = 4096


def take_tensors(value: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """`value` with a mark in place of every tensor in its dicts, lists and tuples, and the tensors by key.

    Args:
        where: the key of the value; those of its tensors begin with it.
    """
    found: dict[str, torch.Tensor] = {}

    def taken(item: Any, path: str) -> Any:
        if isinstance(item, torch.Tensor):
            if type(item) not in (torch.Tensor, torch.nn.Parameter):
                raise CheckpointError(f"{path}: a {type(item).__name__}; expected a plain tensor; way out: give its local values")
            found[path] = item.detach()
            return {_TENSOR: path, "digest": digest(item)}  # so that values compare as their tensors do
        if type(item) is dict:
            if _TENSOR in item:
                raise CheckpointError(f"{path}: the key {_TENSOR!r} is taken; way out: use another key")
            return {key: taken(inner, f"{path}.{key}") for key, inner in item.items()}
        if type(item) in (list, tuple):
            return type(item)(taken(inner, f"{path}[{index}]") for index, inner in enumerate(item))
        return item

    return taken(value, where), found


def put_tensors(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    """Undo `take_tensors`."""
    if isinstance(value, Mapping):
        if _TENSOR in value:
            return read(value[_TENSOR])
        return {key: put_tensors(inner, read) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(put_tensors(inner, read) for inner in value)
    return value


def copied(value: Any, depth: int = 0) -> Any:
    """`value` with dicts, lists and tuples of its own; everything else in it that can be stored cannot change."""
    if depth > MAX_DEPTH:  # refused when it is stored
        return value
    if type(value) is dict:
        return {key: copied(inner, depth + 1) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(inner, depth + 1) for inner in value)
    return value


def own_tensor(path: str, rank: int) -> str:
    """Key of a tensor inside a value of one rank."""
    return f"{path}/{rank}"


def digest(tensor: torch.Tensor) -> int:
    """A cheap number that differs when any bit does, or the order: CRC-32; of what lies on a device, of weighted sums made there."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    data = flat.view(torch.uint8)
    return zlib.crc32(data.numpy().data) if data.device.type == "cpu" else sums_of_words(data)


def sums_of_words(data: torch.Tensor) -> int:
    """Of bytes anywhere: each block of words is summed with a weight for each place, without overflow, so that no two changes cancel
    but by chance; the bytes of the sums, and what is left of the last word, are then few enough to bring over.
    """
    whole = data.numel() // (4 * _WORDS) * 4 * _WORDS
    found = 0
    if whole and data.data_ptr() % 4 == 0:
        weights = torch.arange(1, 2 * _WORDS, 2, device=data.device)  # below 2**13, beside words below 2**32 and 2**12 of them
        for block in data[:whole].view(torch.int32).view(-1, _WORDS).split(256):
            sums = (block.to(torch.int64) * weights).sum(1)
            found = zlib.crc32(sums.cpu().numpy().data, found)
        data = data[whole:]
    return zlib.crc32(data.cpu().contiguous().numpy().data, found)

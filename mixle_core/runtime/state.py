"""State by logical name and global offset: what a checkpoint is made of, whoever sharded it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from mixle_core.errors import PluginError
from mixle_core.layout import ParameterLayout, Shard
from mixle_core.ownership import Bid, Row, exactly_one
from mixle_core.plan import ParallelPlan

if TYPE_CHECKING:
    from mixle_core.runtime.reduction import Reduction

PARAMETER = "parameter"
"""Kind of the parameter's own values; other kinds are keys of its optimizer state, such as `exp_avg`."""


@attrs.frozen(eq=False)
class StateEntry:
    """A block of one logical tensor, as it lies on this rank.

    Args:
        name: logical name of the parameter.
        kind: "parameter", or a key of its optimizer state.
        shape: of the whole tensor; that of the parameter, or () for a number such as `step`.
        offset: where the block begins on every dimension of the whole tensor.
        tensor: the block; it may share memory with what trains.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor


class StateReader(Protocol):
    """What `load_state` reads from: any block of any tensor, whatever blocks were saved."""

    def kinds(self, name: str) -> Collection[str]:
        """The kinds that there are of a parameter; empty when it was not saved."""

    def read(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """One block, on the CPU."""


@attrs.frozen
class Block:
    """Part of a whole tensor that lies on this rank: where it begins there, where in the local tensor, and its size."""

    offset: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The block of a local tensor; a view."""
        for dim, (start, length) in enumerate(zip(self.local, self.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def blocks_of(row: Row | ParameterLayout, plan: ParallelPlan, position: Mapping[str, int]) -> tuple[Block, ...]:
    """How one rank's local tensor lies in the whole one: a block, or one for each part of a fused matrix.

    Args:
        row: of the ownership table, or a parameter's layout; its roles cut the tensor.
        position: of the rank on every axis, as `Mesh.position`.
    """
    segments = [[(0, 0, extent)] for extent in row.shape]  # for each dim: (in the whole, in the local tensor, length)
    for axis, role in row.roles.items():
        if isinstance(role, Shard):
            number, index = plan.size(axis), position[axis]
            if len(segments[role.dim]) > 1:
                raise PluginError(f"{row.name}: two axes cut dim {role.dim}, one of them in parts; such a tensor cannot be saved")
            segments[role.dim] = list(_pieces(segments[role.dim][0], role, number, index))
    found = []
    for chosen in itertools.product(*segments):
        offset, local, size = zip(*chosen, strict=True) if chosen else ((), (), ())
        found.append(Block(offset, local, size))
    return tuple(found)


def _pieces(segment: tuple[int, int, int], role: Shard, number: int, index: int) -> Iterator[tuple[int, int, int]]:
    start, _, extent = segment
    local = 0
    for part in role.parts or (extent,):
        length = part // number
        yield start + index * length, local, length
        start, local = start + part, local + length


@attrs.frozen
class FlatBlock:
    """Part of a whole tensor that lies in a range of the flattened local one.

    Args:
        offset, size: in the whole tensor.
        box, box_size: the elements of the range that it is cut from, and their shape.
        local: where it begins in that box.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]
    box: slice
    box_size: tuple[int, ...]
    local: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The block of a range's tensor; a view."""
        return Block(self.offset, self.local, self.size).of(flat[self.box].view(self.box_size))


def flat_blocks(blocks: Collection[Block], local_shape: tuple[int, ...], start: int, stop: int) -> tuple[FlatBlock, ...]:
    """What elements `start` to `stop` of the flattened local tensor are in the whole one, in order.

    Args:
        blocks: of the local tensor, from `blocks_of`.
    """
    found = []
    for offset, size in _boxes(local_shape, start, stop):
        first = _flat_index(offset, local_shape) - start
        for block in blocks:
            low = [max(a, b) for a, b in zip(offset, block.local, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, size, block.local, block.size, strict=True)]
            if all(h > x for x, h in zip(low, high, strict=True)):
                found.append(
                    FlatBlock(
                        offset=tuple(g + x - b for g, x, b in zip(block.offset, low, block.local, strict=True)),
                        size=tuple(h - x for x, h in zip(low, high, strict=True)),
                        box=slice(first, first + math.prod(size)),
                        box_size=size,
                        local=tuple(x - a for x, a in zip(low, offset, strict=True)),
                    )
                )
    return tuple(found)


def _flat_index(offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
    index = 0
    for position, extent in zip(offset, shape, strict=True):
        index = index * extent + position
    return index


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into boxes, each contiguous in it: (offset, size)."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for offset, size in _boxes(shape[1:], start - first * inner, stop - first * inner):
            yield (first, *offset), (1, *size)
        return
    if start % inner:
        yield from _boxes(shape, start, (first + 1) * inner)
        first += 1
    whole = stop // inner
    if whole > first:
        yield (first, *(0 for _ in shape[1:])), (whole - first, *shape[1:])
    if stop % inner:
        yield from _boxes(shape, whole * inner, stop)


def save_state(reduction: Reduction, optimizers: Mapping[str, torch.optim.Optimizer]) -> tuple[StateEntry, ...]:
    """What plugins name of this rank's state, by name, kind and offset.

    Raises:
        PluginError: an answer that is no entries.
        OwnershipError: two plugins that name one parameter's state.
    """
    answers = reduction.plugins.ask("save_state", model=reduction.model, optimizers=optimizers, ownership=reduction.table)
    for who, entries in answers:
        if not isinstance(entries, tuple) or not all(isinstance(entry, StateEntry) for entry in entries):
            raise reduction.plugins.misanswered(who, "save_state", entries, "a tuple of StateEntry or None")
    exactly_one(
        sorted({entry.name for _, entries in answers for entry in entries}),
        [Bid(reduction.plugins.labels[who], {entry.name for entry in entries}) for who, entries in answers],
        what="one plugin names a parameter's state",
        way_out={"nobody": "", "several": "leave one of them out of MIXLE_PLUGINS"},
    )
    found = [entry for _, entries in answers for entry in entries]
    return tuple(sorted(found, key=lambda entry: (entry.name, entry.kind, entry.offset)))


def load_state(reduction: Reduction, optimizers: Mapping[str, torch.optim.Optimizer], reader: StateReader) -> frozenset[str]:
    """Let plugins read their state; returns the names whose state was loaded.

    Raises:
        PluginError: an answer that is no set of names.
    """
    options = {"model": reduction.model, "optimizers": optimizers, "ownership": reduction.table, "reader": reader}
    answers = reduction.plugins.ask("load_state", **options)
    for who, names in answers:
        if not isinstance(names, (set, frozenset)):
            raise reduction.plugins.misanswered(who, "load_state", names, "a set of names or None")
    return frozenset(name for _, names in answers for name in names)

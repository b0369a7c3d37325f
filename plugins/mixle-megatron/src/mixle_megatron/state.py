"""Megatron's parameters and optimizer state by logical name and global offset, however they are sharded here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from mixle_core import OwnershipTable, Row
from mixle_core.runtime import Block, FlatBlock, StateEntry, StateReader, blocks_of, flat_blocks
from mixle_megatron.optimizer import SteppedByMegatron


def save(model: Any, optimizers: Mapping[str, Any], ownership: OwnershipTable) -> tuple[StateEntry, ...]:
    """A block for each part of a parameter that lies here, and the optimizer's tensors of the part that is stepped here."""
    entries = []
    for row, parameter in _held(model, ownership):
        blocks = blocks_of(row, ownership.plan, model.mesh.position)
        entries += [StateEntry(row.name, "parameter", row.shape, block.offset, block.of(parameter.detach())) for block in blocks]
        for kind, value, pieces in _optimizer_state(model, optimizers, row, parameter, blocks):
            if not value.dim() or (value.numel() == 1 and kind == "step"):
                entries.append(StateEntry(row.name, kind, (), (), value.detach().reshape(())))
            else:
                entries += [StateEntry(row.name, kind, row.shape, piece.offset, piece.of(value.detach())) for piece in pieces]
    return tuple(entries)


def load(model: Any, optimizers: Mapping[str, Any], ownership: OwnershipTable, reader: StateReader) -> frozenset[str]:
    """Fill parameters, and the optimizer state that was saved of them; a parameter without any keeps none."""
    loaded = set()
    with torch.no_grad():
        for row, parameter in _held(model, ownership):
            kinds = sorted(reader.kinds(row.name))
            if "parameter" not in kinds:
                continue
            blocks = blocks_of(row, ownership.plan, model.mesh.position)
            for block in blocks:
                block.of(parameter).copy_(reader.read(row.name, "parameter", block.offset, block.size))
            loaded.add(row.name)
            stepped = _stepped(model, optimizers, row, parameter, blocks)
            if stepped is None:
                continue
            state, tensor, pieces = stepped
            state.clear()
            for kind in kinds:
                if kind == "parameter":
                    continue
                if kind == "step":
                    state[kind] = reader.read(row.name, kind, (), ()).to(torch.float32).reshape(())
                    continue
                state[kind] = torch.zeros_like(tensor)
                for piece in pieces:
                    piece.of(state[kind]).copy_(reader.read(row.name, kind, piece.offset, piece.size))
    return frozenset(loaded)


def _held(model: Any, ownership: OwnershipTable) -> Iterator[tuple[Row, Any]]:
    parameters = model.owned
    for row in ownership.rows:
        if row.name in parameters:
            yield row, parameters[row.name][0]


def _stepped(
    model: Any, optimizers: Mapping[str, Any], row: Row, parameter: Any, blocks: tuple[Block, ...]
) -> tuple[dict[str, Any], torch.Tensor, tuple[Block | FlatBlock, ...]] | None:
    """The optimizer's own state of what it steps of a parameter here, that tensor, and how it lies in the whole one."""
    part = model.owned[row.name][1]
    for optimizer in optimizers.values():
        found = optimizer.stepped(parameter) if isinstance(optimizer, SteppedByMegatron) else (optimizer.state, parameter)
        if found is None or (found[1] is parameter and not any(parameter is p for g in optimizer.param_groups for p in g["params"])):
            continue
        states, tensor = found
        pieces: tuple[Block | FlatBlock, ...] = blocks
        if part is not None:
            pieces = flat_blocks(blocks, row.local_shape, part.start, part.stop)
        return states[tensor], tensor, pieces
    return None


def _optimizer_state(
    model: Any, optimizers: Mapping[str, Any], row: Row, parameter: Any, blocks: tuple[Block, ...]
) -> Iterator[tuple[str, torch.Tensor, tuple[Block | FlatBlock, ...]]]:
    stepped = _stepped(model, optimizers, row, parameter, blocks)
    if stepped is None:
        return
    state, _, pieces = stepped
    for kind, value in sorted(state.items()):
        if isinstance(value, torch.Tensor):
            yield kind, value, pieces

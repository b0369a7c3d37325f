"""Where the parameters of a model lie on this rank: blocks of whole tensors, by logical name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mixle_core.checkpoint import CheckpointError
from mixle_core.layout import logical_name
from mixle_core.ownership import Row
from mixle_core.runtime._upstream import local_block
from mixle_core.runtime.initialise import logical_parameters
from mixle_core.runtime.reduction import Reduction
from mixle_core.runtime.state import Block, blocks_of


@attrs.frozen(eq=False)
class Held:
    """One parameter as it lies on this rank.

    Args:
        shape: of the whole tensor.
        blocks: how the local tensor lies in it; none where this rank holds no element.
        copies: ranks that hold the same block; None when unknown.
    """

    name: str
    parameter: torch.Tensor
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    copies: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is all of it."""
        return tuple(local_of(self.parameter).shape) == self.shape

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is cut as the parameter is."""
        return tensor.shape == self.parameter.shape and isinstance(tensor, DTensor) == isinstance(self.parameter, DTensor)

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Offset in the whole tensor, and view, of each block of a tensor that is cut as the parameter is."""
        local = local_of(tensor)
        for block in self.blocks:
            yield block.offset, block.of(local)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What of `tensor` is in this process, sharing its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held_by_reduction(reduction: Reduction) -> list[Held]:
    """The parameters of an attached model, trainable or not, that this rank holds; tied ones once."""
    rows = {row.name: row for row in reduction.table.rows}
    plan, position = reduction.mesh.plan, reduction.mesh.position
    found = []
    for name, parameter in reduction.named_parameters():
        layout = reduction.layouts.parameters[name]
        row: Row | None = rows.get(name)
        blocks = blocks_of(layout, plan, position)
        local_shape = layout.local_shape({axis: plan.size(axis) for axis in layout.roles})
        if isinstance(parameter, DTensor):
            _require_shape(name, tuple(parameter.shape), local_shape)
            offset, size = local_block(parameter)
            blocks = tuple(_within(blocks, offset, size))
        else:
            _require_shape(name, tuple(parameter.shape), local_shape)
        copies = row.copies if row is not None else None
        found.append(Held(name, parameter, layout.shape, blocks, copies))
    return found


def held_by_module(module: nn.Module) -> list[Held]:
    """The parameters of any model: DTensors lie as their placements say, others are whole on every rank. Names without wrappers."""
    found = []
    for name, parameter in logical_parameters(module).items():
        if isinstance(parameter, DTensor):
            offset, size = local_block(parameter)
            blocks = (Block(offset, (0,) * len(size), size),)
            found.append(Held(name, parameter, tuple(parameter.shape), blocks, _copies(parameter)))
        else:
            shape = tuple(parameter.shape)
            found.append(Held(name, parameter, shape, (Block((0,) * len(shape), (0,) * len(shape), shape),)))
    return found


def _copies(parameter: DTensor) -> int:
    """Ranks of the world that hold the same block, so that what nobody else has need not be compared."""
    mesh = parameter.device_mesh
    alike = [mesh.size(dim) for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return math.prod(alike) * (dist.get_world_size() // mesh.size())


def persistent_buffers(model: nn.Module, transparent: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Logical name -> buffer that the model would have in its state dict."""
    transparent = tuple(transparent)
    buffers = {logical_name(raw, transparent): buffer for raw, buffer in model.named_buffers(remove_duplicate=False)}
    if not buffers:  # to ask for the state dict runs hooks of wrappers
        return {}
    kept = {logical_name(raw, transparent) for raw in model.state_dict(keep_vars=True)}
    return {name: buffers[name] for name in sorted(buffers.keys() & kept)}


def reshard(model: nn.Module) -> None:
    """Let units of fully_shard drop what they gathered: it would outlive the values that are loaded into their shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _within(blocks: Iterable[Block], offset: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Block]:
    """Blocks of a local tensor, cut to the part of it at `offset` that is left after a second cut."""
    for block in blocks:
        low = [max(a, b) for a, b in zip(block.local, offset, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(block.local, block.size, offset, size, strict=True)]
        if all(h > x for x, h in zip(low, high, strict=True)):
            yield Block(
                offset=tuple(o + x - a for o, x, a in zip(block.offset, low, block.local, strict=True)),
                local=tuple(x - b for x, b in zip(low, offset, strict=True)),
                size=tuple(h - x for x, h in zip(low, high, strict=True)),
            )


def _require_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(
            f"{name} has shape {list(found)} on this rank; expected {list(wanted)} by its layout; way out: attach the model anew, or let "
            "the plugin that cut it answer save_state"
        )


def names_of(held: Iterable[Held]) -> Mapping[int, Held]:
    """Identity of a parameter -> how it lies."""
    return {id(one.parameter): one for one in held}

"""What one rank has to say for a checkpoint: blocks of tensors, opaque tensors, and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.distributed.tensor import DTensor

from mixle_core.checkpoint import CheckpointError, Piece, opaque
from mixle_core.runtime.saving.held import Held, local_of, names_of
from mixle_core.runtime.saving.plain import take_tensors
from mixle_core.runtime.state import PARAMETER, StateEntry

BUFFER = "buffer"
"""Kind of a module's persistent buffers."""


@attrs.frozen(eq=False)
class Item:
    """A block to write.

    Args:
        copied: whether other ranks may hold the same block.
    """

    piece: Piece
    copied: bool = True


@attrs.frozen(eq=False)
class Snapshot:
    """This rank's state.

    Args:
        items: blocks of tensors.
        shared: plain values that every rank which has them must have alike, by key.
        own: plain values that may differ between ranks, by key.
    """

    items: tuple[Item, ...]
    shared: Mapping[str, Any]
    own: Mapping[str, Any]


def parameter_items(held: Iterable[Held]) -> list[Item]:
    """The values of parameters."""
    return [Item(piece, copied=one.copies != 1) for one in held for piece in _pieces(one, PARAMETER, one.parameter)]


def plugin_items(entries: Iterable[StateEntry]) -> list[Item]:
    """What plugins named."""
    return [Item(Piece(e.name, e.kind, tuple(e.shape), tuple(e.offset), e.tensor.detach())) for e in entries]


def buffer_items(buffers: Mapping[str, torch.Tensor]) -> list[Item]:
    """Persistent buffers, whole."""
    return [Item(Piece(name, BUFFER, tuple(b.shape), (0,) * b.dim(), local_of(b))) for name, b in buffers.items()]


def own_buffer(name: str, rank: int) -> str:
    """Key of a buffer of one rank."""
    return f"buffer/{name}/{rank}"


def opaque_items(tensors: Mapping[str, torch.Tensor]) -> list[Item]:
    """Tensors of this rank alone."""
    return [Item(opaque(key, tensor), copied=False) for key, tensor in tensors.items()]


def optimizer_items(
    optimizers: Mapping[str, torch.optim.Optimizer], held: Iterable[Held], elsewhere: Iterable[str]
) -> tuple[list[Item], dict[str, Any], dict[str, Any]]:
    """The optimizers' tensors by parameter and kind, their other values, and the options of their groups.

    Args:
        elsewhere: names whose state a plugin names.

    Returns:
        Items; name -> kind -> plain value; pattern -> class and groups (options and names).

    Raises:
        CheckpointError: state that belongs to no parameter, or that is cut in a way nobody can tell.
    """
    by_id, named_elsewhere = names_of(held), set(elsewhere)
    items: list[Item] = []
    values: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for pattern, optimizer in optimizers.items():
        groups = []
        stray = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
        if stray:
            raise CheckpointError(
                f"optimizer {pattern!r} ({kind_of(optimizer)}) has state under {stray[0]!r}, which is no parameter; "
                "expected state of parameters; "
                "way out: an optimizer that keeps none beside it"
            )
        for group in optimizer.param_groups:
            known = held_in(group, optimizer, by_id)
            options = {key: _number(value, key) for key, value in group.items() if key != "params"}
            groups.append({"names": sorted(one.name for one in known), "options": options})
            for one in known:
                if one.name not in named_elsewhere:
                    _add_state(one, pattern, optimizer.state.get(one.parameter, {}), items, values)
        described[pattern] = {"class": kind_of(optimizer), "groups": groups}
    return items, values, described


def _number(option: Any, key: str) -> Any:
    """An option as it is stored: a number in a tensor, as captured optimizers have their rates, by its value."""
    if isinstance(option, torch.Tensor):
        if option.numel() != 1:
            raise CheckpointError(
                f"option {key!r} is a tensor of shape {list(option.shape)}; expected a number; way out: use plain options"
            )
        return option.item()
    return option


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Class name of an optimizer; of the one inside where it only drives another (`stands_for`)."""
    return str(getattr(optimizer, "stands_for", type(optimizer)).__name__)


def held_in(group: Mapping[str, Any], optimizer: torch.optim.Optimizer, by_id: Mapping[int, Held]) -> list[Held]:
    """Parameters of this rank in a group; an optimizer that steps slices of its own says of which parameter (`whole`)."""
    whole: Callable[[Any], Any] = getattr(optimizer, "whole", lambda parameter: parameter)
    found = [by_id.get(id(whole(parameter))) for parameter in group["params"]]
    if None in found:
        shape = list(group["params"][found.index(None)].shape)
        raise CheckpointError(
            f"an optimizer ({kind_of(optimizer)}) has a parameter of shape {shape} that is none of the model's; "
            "expected the model's only; way "
            "out: make it part of the model, or give that optimizer a checkpoint of its own"
        )
    return [one for one in found if one is not None]


def _add_state(one: Held, pattern: str, state: Mapping[str, Any], items: list[Item], values: dict[str, Any]) -> None:
    for kind, value in state.items():
        where = f"state {kind!r} of {one.name} in optimizer {pattern!r}"
        if not isinstance(kind, str) or kind in (PARAMETER, BUFFER):
            raise CheckpointError(f"{where}: a kind that cannot be stored; expected text other than {PARAMETER!r} and {BUFFER!r}")
        if not isinstance(value, torch.Tensor):
            plain, inside = take_tensors(value, where)
            if inside:
                raise CheckpointError(
                    f"{where} is a {type(value).__name__} with tensors inside; expected a tensor or plain values, so "
                    "that it can be put back "
                    "under another plan; way out: an optimizer that keeps a tensor for each parameter"
                )
            values.setdefault(one.name, {})[kind] = plain
        elif one.fits(value):
            items += [Item(piece, copied=one.copies != 1) for piece in _pieces(one, kind, value)]
        elif not isinstance(value, DTensor) and (not value.dim() or one.is_whole):
            # a number, or of another shape beside a parameter that nobody cuts: the same wherever the parameter is
            items.append(Item(Piece(one.name, kind, tuple(value.shape), (0,) * value.dim(), value.detach())))
        else:
            raise CheckpointError(
                f"{where} has shape {list(value.shape)} beside a parameter of {list(one.shape)} that is cut; expected "
                "its shape or a number, "
                "so that it can be put back under another plan; way out: an optimizer whose state has the parameter's shape"
            )


def _pieces(one: Held, kind: str, tensor: torch.Tensor) -> list[Piece]:
    return [Piece(one.name, kind, one.shape, offset, view) for offset, view in one.views(tensor)]


def stateful_values(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Key -> what the object's `state_dict()` says (a plain value stands for itself), and the tensors in it.

    Raises:
        CheckpointError: an object that has no `state_dict()` and is no plain value.
    """
    values: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, thing in objects.items():
        said = thing.state_dict() if callable(getattr(thing, "state_dict", None)) else thing
        values[key], found = take_tensors(said, f"state/{key}")
        tensors |= found
    return values, tensors


def staged(
    items: Iterable[Item], buffers: dict[tuple[Any, ...], torch.Tensor], *, clone: Callable[[torch.Tensor], torch.Tensor]
) -> list[Item]:
    """The same items with values of their own, in memory that the last save used where it fits."""
    copied = []
    for item in items:
        piece = item.piece
        assert isinstance(piece.tensor, torch.Tensor)
        key = (piece.name, piece.kind, piece.offset, tuple(piece.tensor.shape), piece.tensor.dtype)
        if key in buffers:
            buffers[key].copy_(piece.tensor)
        else:
            buffers[key] = clone(piece.tensor)
        copied.append(Item(attrs.evolve(piece, tensor=buffers[key]), item.copied))
    return copied

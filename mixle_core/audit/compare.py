"""Errors between tensors, and whole tensors from the slices of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mixle_core.layout import Shard
from mixle_core.ownership import Row
from mixle_core.plan import ParallelPlan, mesh_axes


def relative_error(value: torch.Tensor | None, reference: torch.Tensor | None) -> float:
    """Norm of the difference over the norm of the reference; 0 when both are None, infinite when one is.

    Against an all-zero reference it is the norm of `value`.
    """
    if value is None or reference is None:
        return 0.0 if value is None and reference is None else math.inf
    if value.shape != reference.shape:
        return math.inf
    difference = float((value.double() - reference.double()).norm())
    scale = float(reference.double().norm())
    error = difference / scale if scale else difference
    return error if math.isfinite(error) else math.inf


def zeroed_row(value: torch.Tensor, reference: torch.Tensor, level: float) -> int | None:
    """The first row along dim 0 with nothing but zeros in `value` and a norm above `level` of the largest row's in `reference`.

    No rounding makes a whole row zero, so that rows can be missed whose error is far below that of the whole tensor. Vectors have no
    rows.
    """
    if value.dim() < 2 or not value.numel():
        return None
    norms = torch.linalg.vector_norm(reference.flatten(1), dim=1)
    rows = (~value.flatten(1).any(1) & (norms > level * norms.max())).nonzero()
    return int(rows[0]) if len(rows) else None


def assemble(plan: ParallelPlan, row: Row, pieces: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, bool]:
    """Put the local tensors of one parameter together.

    Args:
        pieces: per rank of the world: the parameter or its gradient, sliced as the table says; slices over stored axes may
            be flat. Ranks that do not hold it are passed over.

    Returns:
        The whole tensor (global shape), or None when no rank has one; and whether all copies are equal to the bit.
    """
    wholes = list(assemble_copies(plan, row, pieces).values())
    return (None if any(whole is None for whole in wholes) else wholes[0]), all(whole is wholes[0] for whole in wholes)


def assemble_copies(plan: ParallelPlan, row: Row, pieces: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
    """Rank -> the whole tensor (global shape) that its slice is a part of, for every rank that holds one.

    Ranks with copies of one slice belong to different wholes, so that copies that drifted apart are not mixed. Where all copies
    are equal to the bit there is one whole for all ranks.
    """
    held = {rank: piece for rank, piece in enumerate(pieces) if row.held_by(plan, rank)}
    if any(piece is None for piece in held.values()):
        missing = all(piece is None for piece in held.values())
        return {rank: None if missing or piece is None else piece for rank, piece in held.items()}
    view = mesh_axes((*row.roles, *row.pending))
    whole_here = all(piece is not None and tuple(piece.shape) == row.local_shape for piece in held.values())
    stored = () if whole_here else row.stored  # an owner may keep gradients and state sharded, and parameters whole
    cut = [axis for axis in view if plan.size(axis) > 1 and (axis in stored or isinstance(row.roles.get(axis), Shard))]
    by_slice: dict[tuple[int, ...], list[torch.Tensor]] = {}
    copy_of: dict[int, int] = {}
    for rank, piece in held.items():
        at = plan.coordinates(rank, view)
        copies = by_slice.setdefault(tuple(at[axis] for axis in cut), [])
        copy_of[rank] = len(copies)
        copies.append(piece)  # type: ignore[arg-type]
    if all(torch.equal(copy, copies[0]) for copies in by_slice.values() for copy in copies[1:]):
        whole = _put_together({position: copies[0] for position, copies in by_slice.items()}, row, cut, stored)
        return dict.fromkeys(held, whole)
    number = max(map(len, by_slice.values()))
    wholes = [
        _put_together({position: copies[min(n, len(copies) - 1)] for position, copies in by_slice.items()}, row, cut, stored)
        for n in range(number)
    ]
    return {rank: wholes[copy_of[rank]] for rank in held}


def _put_together(whole: dict[tuple[int, ...], torch.Tensor], row: Row, cut: Sequence[str], stored: tuple[str, ...]) -> torch.Tensor:
    # what was cut last is joined first: stored axes, then the innermost of the others
    for depth in sorted(range(len(cut)), key=lambda depth: (cut[depth] not in stored, -depth)):
        axis = cut[depth]
        if axis not in stored:
            whole = {position: _shaped(tensor, row) for position, tensor in whole.items()}
        grouped: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for position in sorted(whole):
            rest = (*position[:depth], 0, *position[depth + 1 :])
            grouped.setdefault(rest, []).append(whole[position])
        role = row.roles.get(axis)
        whole = {position: _join(slices, role if isinstance(role, Shard) else Shard(0)) for position, slices in grouped.items()}
    (tensor,) = whole.values()
    return _shaped(tensor, row)


def _shaped(tensor: torch.Tensor, row: Row) -> torch.Tensor:
    """Flat slices, put together, in the shape that they have on one rank."""
    return tensor.reshape(row.local_shape) if tensor.dim() == 1 and tensor.numel() == math.prod(row.local_shape) else tensor


def _join(slices: list[torch.Tensor], role: Shard) -> torch.Tensor:
    """Undo the cut of one axis; the parts of a fused matrix lie one behind the other in every slice."""
    if role.parts is None:
        return torch.cat(slices, role.dim)
    sizes = [part // len(slices) for part in role.parts]
    split = [piece.split(sizes, role.dim) for piece in slices]
    return torch.cat([torch.cat([pieces[i] for pieces in split], role.dim) for i in range(len(sizes))], role.dim)

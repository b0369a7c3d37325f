"""Where a rank's tensor lies in the whole one: equal, a slice (also of the parts of a fused matrix), one term of a sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import attrs
import torch

from mixle_core.audit.compare import relative_error
from mixle_core.layout import Lie, Replica, Shard, Term

_EQUAL_PARTS = (2, 3, 4)
"""Numbers of equal parts that are tried where rows alone do not tell."""

_FAR = 1e-2
"""Relative error of an activation's gradient that rounding does not explain; those of parameters have the tolerance."""

WHOLE, SHARED = Replica("complete"), Replica("partial")


@attrs.frozen
class Cut:
    """How the ranks' pieces lie in the whole along one dim: `parts` are those of `Shard`, of which several may fit the values."""

    dim: int
    parts: tuple[tuple[int, ...] | None, ...]


def piece(whole: torch.Tensor, dim: int, parts: tuple[int, ...] | None, number: int, rank: int) -> torch.Tensor:
    """What `rank` of `number` holds of `whole`; the parts of a fused matrix are cut one by one."""
    blocks = whole.split(list(parts or (whole.shape[dim],)), dim)
    return torch.cat([block.chunk(number, dim)[rank] for block in blocks], dim)


def _spread(shapes: Iterable[Sequence[int]]) -> str:
    return " and ".join(dict.fromkeys(str(list(shape)) for shape in shapes))


def cut_dim(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> int | str:
    """The one dim along which the shapes of the pieces differ from the whole, or why there is none."""
    shapes = {tuple(held.shape) for held in pieces}
    first = pieces[0]
    dims = [dim for dim, (a, b) in enumerate(zip(first.shape, whole.shape, strict=False)) if a != b]
    if len(shapes) > 1:
        return f"the ranks hold shapes {_spread(shapes)} of {list(whole.shape)}; a role cuts evenly"
    if first.dim() != whole.dim() or len(dims) != 1:
        return f"the ranks hold shape {list(first.shape)} of {list(whole.shape)}: no slice along one dim"
    return dims[0]


def locate(pieces: Sequence[torch.Tensor], whole: torch.Tensor, hints: Iterable[tuple[int, ...]] = ()) -> Cut | str:
    """Find the pieces of a parameter in the whole by their rows, which are equal to the bit; else say why they are not there.

    Args:
        pieces: per rank.
        whole: the reference's values.
        hints: parts that other parameters of the module have.
    """
    dim = cut_dim(pieces, whole)
    if isinstance(dim, str):
        return dim
    number, extent = len(pieces), whole.shape[dim]
    held = [_rows(values, dim) for values in pieces]
    there: dict[bytes, int] = {}
    rows = _rows(whole, dim)
    for index, row in enumerate(rows):
        there.setdefault(row, index)
    lost = next(((rank, index) for rank, mine in enumerate(held) for index, row in enumerate(mine) if row not in there), None)
    if lost is not None:
        near = relative_error(pieces[lost[0]], whole.narrow(dim, 0, len(held[lost[0]])))
        return (
            f"index {lost[1]} along dim {dim} of rank {lost[0]}'s {list(pieces[0].shape)} is nowhere in the reference's "
            f"{list(whole.shape)} (relative error to its start {near:.3g}): no slice of it"
        )
    if number * len(held[0]) != extent:
        return _repeated(held, whole, dim)
    if len(there) == extent:  # every row is different, so its place is known
        places = [[there[row] for row in mine] for mine in held]
        found = _parts(places[0], number)
        order = torch.arange(extent)
        if any(places[rank] != piece(order, 0, found, number, rank).tolist() for rank in range(number)):
            return f"the ranks hold the rows of dim {dim} in an order that neither a slice nor parts describe, such as {places[0][:8]}"
        return Cut(dim, (None if len(found) == 1 else found,))
    fitting = [
        parts
        for parts in _candidates(extent, number, hints)
        if all(torch.equal(piece(whole, dim, parts, number, rank), pieces[rank]) for rank in range(number))
    ]
    return Cut(dim, tuple(fitting)) if fitting else f"its slices of dim {dim} repeat rows, and neither one slice nor equal parts fit"


def _rows(values: torch.Tensor, dim: int) -> list[bytes]:
    flat = values.detach().movedim(dim, 0).reshape(values.shape[dim], -1).contiguous()
    return [row.view(torch.uint8).numpy().tobytes() for row in flat]


def _parts(places: Sequence[int], number: int) -> tuple[int, ...]:
    """Sizes of the parts from the runs of neighbours that the first rank holds."""
    runs = [1]
    for before, after in itertools.pairwise(places):
        if after == before + 1:
            runs[-1] += 1
        else:
            runs.append(1)
    return tuple(number * run for run in runs)


def _candidates(extent: int, number: int, hints: Iterable[tuple[int, ...]]) -> list[tuple[int, ...] | None]:
    equal = [(extent // k,) * k for k in _EQUAL_PARTS if extent % (k * number) == 0]
    known = [tuple(part * extent // sum(hint) for part in hint) for hint in hints if extent % sum(hint) == 0 or sum(hint) % extent == 0]
    fitting = [parts for parts in dict.fromkeys((*known, *equal)) if sum(parts) == extent and not any(part % number for part in parts)]
    return [None, *fitting]


def _repeated(held: Sequence[list[bytes]], whole: torch.Tensor, dim: int) -> str:
    blocks: dict[tuple[bytes, ...], list[int]] = {}
    for rank, mine in enumerate(held):
        blocks.setdefault(tuple(mine), []).append(rank)
    ranks = " | ".join(",".join(map(str, block)) for block in blocks.values())
    if len(blocks) < len(held) and len(blocks) * len(held[0]) == whole.shape[dim]:
        return (
            f"each group of ranks {ranks} holds one slice of dim {dim} together, {len(held[0])} of {whole.shape[dim]}: a role is a copy "
            f"on all ranks or a slice on each; choose tp up to {len(blocks)}"
        )
    sizes = f"{len(held[0])} on each of {len(held)} ranks, {whole.shape[dim]} in all"
    return f"the ranks' slices of dim {dim} overlap or leave some of it out: {sizes}"


def lie(
    values: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    whole: torch.Tensor,
    whole_gradient: torch.Tensor | None,
    hints: Iterable[tuple[int, ...]],
    tolerance: float,
) -> Lie | None:
    """How an activation lies on the ranks, from its values and from its gradients; None when it is none of the kinds."""
    if all(value.shape == whole.shape for value in values):
        if close(values, [whole] * len(values), tolerance):
            return _replica(gradients, whole_gradient)
        total = torch.stack([value.double() for value in values]).sum(0)
        return Term() if close([total], [whole], tolerance) else None
    cut = activation_cut(values, whole, hints, tolerance)
    return None if cut is None else Shard(cut[0], parts=cut[1])


def activation_cut(
    values: Sequence[torch.Tensor], whole: torch.Tensor, hints: Iterable[tuple[int, ...]], tolerance: float
) -> tuple[int, tuple[int, ...] | None] | None:
    """Dim and parts of values that are slices up to rounding; the last dim is -1, as people write it."""
    dim = cut_dim(values, whole)
    if isinstance(dim, str) or values[0].shape[dim] * len(values) != whole.shape[dim]:
        return None
    number = len(values)
    for parts in _candidates(whole.shape[dim], number, hints):
        if close(values, [piece(whole, dim, parts, number, rank) for rank in range(number)], tolerance):
            return (-1 if dim == whole.dim() - 1 else dim), parts
    return None


def close(values: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tolerance: float) -> bool:
    """Whether every value is the wanted one within `tolerance`, relative."""
    return all(relative_error(value, want) <= tolerance for value, want in zip(values, wanted, strict=True))


def _replica(gradients: Sequence[torch.Tensor | None], whole: torch.Tensor | None) -> Replica | None:
    """What the gradients of a whole value are: the nearer of the two kinds, None when both are far."""
    if whole is None or not float(whole.norm()) or all(gradient is None for gradient in gradients):
        return WHOLE
    given = [torch.zeros_like(whole) if gradient is None else gradient for gradient in gradients]
    if any(gradient.shape != whole.shape for gradient in given):
        return WHOLE
    alike = max(relative_error(gradient, whole) for gradient in given)
    term = relative_error(torch.stack([gradient.double() for gradient in given]).sum(0), whole)
    if min(alike, term) > _FAR:
        return None
    return SHARED if term < alike else WHOLE

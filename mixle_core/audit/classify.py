"""What a wrong gradient is: named from the values on all ranks, the reference, and those of single microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import attrs
import torch

from mixle_core.audit.compare import relative_error, zeroed_row

TOLERANCE = 1e-4
"""Relative error up to which values are equal; kinds of fault are at least a factor or a missing term apart."""

_NOISE = 1e-2
"""Of the tolerance: a row this far below the largest one may be what rounding leaves of zeros."""

RIGHT = "right"
MISSING_SUM = "missing sum"
REDUCED_TWICE = "reduced twice"
REDUCED_AGAIN = "reduced again at every microbatch"
AVERAGED = "averaged instead of summed"
SCALED = "scaled by a constant"
DRIFTING = "copies drifting apart"
NEVER_TRAINED = "never trained"
NOT_EXPLAINED = "not explained"

KINDS = (RIGHT, MISSING_SUM, REDUCED_TWICE, REDUCED_AGAIN, AVERAGED, SCALED, DRIFTING, NEVER_TRAINED, NOT_EXPLAINED)

Groups = Mapping[str, Sequence[Sequence[int]]]
"""Axis, or any name -> the groups of ranks that may have reduced together; each rank is in one of them."""


@attrs.frozen
class Verdict:
    """What one parameter's gradient is.

    Args:
        kind: one of `KINDS`.
        ratio: of the value on the first rank to the reference, by projection; None without one.
        error: the largest relative error over the ranks.
        evidence: the numbers that say so, in words.
    """

    kind: str
    ratio: float | None
    error: float
    evidence: str


def default_groups(world_size: int) -> Groups:
    """Neighbours, and ranks that are equally far apart, for every divisor of the world size."""
    found: dict[str, Sequence[Sequence[int]]] = {}
    for size in range(2, world_size + 1):
        if world_size % size:
            continue
        blocks = [list(range(first, first + size)) for first in range(0, world_size, size)]
        found[_name(blocks)] = blocks
        step = world_size // size
        found.setdefault(_name(strided := [list(range(first, world_size, step)) for first in range(step)]), strided)
    return found


def _name(groups: Sequence[Sequence[int]]) -> str:
    return " | ".join(",".join(map(str, ranks)) for ranks in groups)


def classify(
    seen: Sequence[torch.Tensor | None],
    wanted: Sequence[torch.Tensor | None],
    single: Sequence[Sequence[torch.Tensor | None]] = (),
    groups: Groups | None = None,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Name what one parameter's gradient is on all ranks.

    Args:
        seen: per rank, its final gradient: whole, or the slice that it holds; None where there is none.
        wanted: per rank, the reference of the same shape.
        single: per microbatch, as `wanted`: the reference of that microbatch alone, however scaled.
        groups: of ranks that may have reduced together.
    """
    if all(value is None for value in wanted):
        extra = [rank for rank, value in enumerate(seen) if value is not None and float(value.norm()) > 0]
        return Verdict(NOT_EXPLAINED, None, math.inf, f"rank {extra[0]} has a gradient, one process has none") if extra else _right(0.0)
    missing = [rank for rank, value in enumerate(seen) if value is None]
    if missing:
        where = "no rank has a gradient" if len(missing) == len(seen) else f"rank {missing[0]} has no gradient"
        return Verdict(NEVER_TRAINED, None, math.inf, f"{where}, one process has one")
    values = [value.double() for value in seen if value is not None]
    references = [value.double() for value in wanted if value is not None]
    if any(v.shape != w.shape for v, w in zip(values, references, strict=True)):
        return Verdict(NOT_EXPLAINED, None, math.inf, "the shape is neither that of the reference nor of a slice of it")
    errors = [relative_error(v, w) for v, w in zip(values, references, strict=True)]
    worst = max(errors)
    ratios = [_ratio(v, w) for v, w in zip(values, references, strict=True)]
    if worst <= tolerance:
        return _zeroed(values, references, ratios[0], tolerance) or _right(worst)
    partition = groups if groups is not None else default_groups(len(values))
    sizes = sorted({len(ranks) for blocks in partition.values() for ranks in blocks if len(ranks) > 1})
    found = (
        _again(values, references, single, sizes, tolerance)
        or _scaled(values, references, ratios, sizes, tolerance)
        or _sums(values, references, partition, tolerance)
        or _drifting(values, references, tolerance)
    )
    kind, evidence = found or (NOT_EXPLAINED, f"relative errors of the ranks {_list(errors)}")
    return Verdict(kind, ratios[0], worst, evidence)


def _right(error: float) -> Verdict:
    return Verdict(RIGHT, 1.0, error, "")


def _zeroed(values: Sequence[torch.Tensor], references: Sequence[torch.Tensor], ratio: float, tolerance: float) -> Verdict | None:
    """Rows that a rank lost, as of tokens that are rare where one other token makes up the whole norm."""
    for rank, (value, reference) in enumerate(zip(values, references, strict=True)):
        row = zeroed_row(value, reference, _NOISE * tolerance)
        if row is not None:
            return Verdict(NOT_EXPLAINED, ratio, 1.0, f"row {row} is zero on rank {rank}, and is not in one process")
    return None


def _scaled(
    values: Sequence[torch.Tensor], references: Sequence[torch.Tensor], ratios: Sequence[float], sizes: Sequence[int], tolerance: float
) -> tuple[str, str] | None:
    """All ranks hold the reference times one constant."""
    factor = ratios[0]
    if any(relative_error(v, factor * w) > tolerance * max(1.0, abs(factor)) for v, w in zip(values, references, strict=True)):
        return None
    for size in sizes:
        if abs(factor - size) <= tolerance * size:
            return REDUCED_TWICE, f"{size} times the reference on every rank: summed over {size} ranks that had the whole gradient already"
        if abs(factor * size - 1.0) <= tolerance:
            return AVERAGED, f"1/{size} of the reference on every rank: the terms of {size} ranks were averaged"
    return SCALED, f"{factor:.6g} times the reference on every rank"


def _sums(values: Sequence[torch.Tensor], references: Sequence[torch.Tensor], groups: Groups, tolerance: float) -> tuple[str, str] | None:
    """The values of the ranks of a group add up to the reference, or average to it."""
    for name, blocks in groups.items():
        if any(len(ranks) < 2 or max(ranks) >= len(values) for ranks in blocks) or not all(
            _alike(ranks, values, references) for ranks in blocks
        ):
            continue
        sums = [(torch.stack([values[r] for r in ranks]).sum(0), references[ranks[0]], len(ranks)) for ranks in blocks]
        if all(relative_error(total, reference) <= tolerance for total, reference, _ in sums):
            return MISSING_SUM, f"the values of ranks {name} add up to the reference; each has its own term"
        if all(relative_error(total / size, reference) <= tolerance for total, reference, size in sums):
            return MISSING_SUM, f"the values of ranks {name} average to the reference; each has its own"
    return None


def _alike(ranks: Sequence[int], values: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> bool:
    """Whether these ranks should hold the same values."""
    first = ranks[0]
    return all(values[r].shape == values[first].shape and torch.equal(references[r], references[first]) for r in ranks)


def _again(
    values: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
    single: Sequence[Sequence[torch.Tensor | None]],
    sizes: Sequence[int],
    tolerance: float,
) -> tuple[str, str] | None:
    """The accumulated gradient was summed over n ranks at every microbatch: earlier microbatches count n, n^2, ... times."""
    if len(single) < 2 or any(value is None for terms in single for value in terms):
        return None
    for size in sizes:
        close = True
        for rank, (value, reference) in enumerate(zip(values, references, strict=True)):
            terms = [terms[rank].double() for terms in single]  # type: ignore[union-attr]
            total = sum(terms[1:], terms[0])
            scale = _ratio(reference, total)  # however the window divides by its number of microbatches
            predicted = torch.zeros_like(total)
            for term in terms:
                predicted = predicted * size + scale * term
            close = close and relative_error(value, predicted) <= tolerance
        if close:
            powers = ", ".join(str(size**n) for n in reversed(range(len(single))))
            return REDUCED_AGAIN, f"microbatches count {powers} times: what was accumulated is summed over {size} ranks again at each one"
    return None


def _drifting(values: Sequence[torch.Tensor], references: Sequence[torch.Tensor], tolerance: float) -> tuple[str, str] | None:
    """Ranks that should hold the same values do not."""
    for (i, one), (j, other) in itertools.combinations(enumerate(values), 2):
        if one.shape == other.shape and torch.equal(references[i], references[j]) and relative_error(one, other) > tolerance:
            return DRIFTING, f"ranks {i} and {j} differ by {relative_error(one, other):.3g}, and no sum over ranks gives the reference"
    return None


def _ratio(value: torch.Tensor, reference: torch.Tensor) -> float:
    square = float((reference * reference).sum())
    return float((value * reference).sum()) / square if square else math.nan


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)

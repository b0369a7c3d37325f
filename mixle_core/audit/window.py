"""`audit`: compare the gradients that anybody's parallel model ends a window with, rank by rank, with one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mixle_core.audit.classify import DRIFTING, NOT_EXPLAINED, RIGHT, TOLERANCE, Groups, Verdict, classify, default_groups
from mixle_core.audit.compare import relative_error
from mixle_core.errors import UsageError
from mixle_core.layout import logical_name

Window = Callable[[Sequence[Any]], Mapping[str, torch.Tensor | None]]
"""Runs forward and backward of some microbatches without an optimizer; returns name -> final gradient as it lies on this rank."""

Assemble = Callable[[str, Sequence[torch.Tensor | None]], Mapping[int, torch.Tensor | None]]
"""Takes a name and what each rank handed over; returns rank -> the whole gradient of which the rank holds a part."""


@attrs.frozen
class AuditReport:
    """One window of a parallel model against one process: a verdict for each parameter of the reference, by name.

    Args:
        drifted: names of which ranks hold copies that are not equal to the bit, however close to the reference.
        zeros: names with zeros for a gradient where one process has none: an optimizer with weight decay would move them.
    """

    microbatches: int
    verdicts: Mapping[str, Verdict]
    drifted: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()

    @property
    def wrong(self) -> dict[str, Verdict]:
        """Parameters whose gradient is not right."""
        return {name: verdict for name, verdict in self.verdicts.items() if verdict.kind != RIGHT}

    @property
    def error(self) -> float:
        """The largest relative error."""
        return max((verdict.error for verdict in self.verdicts.values()), default=0.0)

    def __str__(self) -> str:
        lines = [f"{name}: {v.kind}; {v.evidence}" for name, v in self.wrong.items()]
        return "\n".join(lines) or f"{len(self.verdicts)} gradients are right (largest error {self.error:.1e})"


def audit(
    window: Window,
    reference: Window,
    batches: Sequence[Any],
    names: Mapping[str, str] | Callable[[str], str] | None = None,
    *,
    groups: Groups | None = None,
    tolerance: float = TOLERANCE,
    whole: Assemble | None = None,
) -> AuditReport:
    """Classify every parameter's gradient after one accumulation window. Collective over the default process group.

    Args:
        window: of the parallel model; takes the microbatches and uses the rows of its own rank.
        reference: of one process, on this rank, with the same initial values and all rows; its loss is divided as the
            window's is.
        batches: microbatches of the window, equal on every rank.
        names: name in the parallel model -> name in the reference; wrapper segments are dropped before.
        groups: of ranks that may have reduced together; None tries neighbours and equal distances.
        tolerance: relative error that is right.
        whole: puts together what ranks hold slices of, for who knows how it is cut; None deals the slices of
            the reference out to the ranks, each to equally many, so that the gradients look most like them.

    Raises:
        UsageError: no microbatch; a gradient of the parallel model that the reference has no name for.
    """
    if not batches:
        raise UsageError("audit: no microbatch; expected at least one")
    seen = _named(window(batches), names)
    wanted = _named(reference(batches), None)
    everyone = _gathered(seen)
    unknown = sorted({name for theirs in everyone for name in theirs} - wanted.keys())
    if unknown:
        raise UsageError(
            f"audit: the reference has no parameter {unknown[0]!r} ({len(unknown)} such); pass names, from names of the parallel model to "
            "those of the reference"
        )
    # a microbatch alone is only needed to explain what is wrong, and takes no collective
    alone = functools.cache(lambda: [_named(reference([batch]), None) for batch in batches] if len(batches) > 1 else [])
    sides = groups if groups is not None else default_groups(len(everyone))
    verdicts, drifted, zeros = {}, [], []
    for name, reference_gradient in wanted.items():
        values = [theirs.get(name) for theirs in everyone]
        if whole is not None:
            values = list(whole(name, values).values())
        places = [_WHOLE] * len(values) if whole is not None else _places(values, reference_gradient, tolerance)
        if isinstance(places, str):
            verdicts[name] = Verdict(NOT_EXPLAINED, None, float("inf"), places)
            continue
        equal = _equal_copies(values, places)
        if not equal:
            drifted.append(name)
        elif len(set(places)) == 1:
            values, places = values[:1], places[:1]
        found = classify(values, [_like(reference_gradient, place) for place in places], (), sides, tolerance)
        if found.kind != RIGHT and len(batches) > 1:
            # one that uses the parameter in no row has no gradient, or no name for it
            terms = [[_like(one.get(name), place) for place in places] for one in alone()]
            found = classify(values, [_like(reference_gradient, place) for place in places], terms, sides, tolerance)
        if found.kind in (NOT_EXPLAINED, DRIFTING) and (astray := _astray(values, reference_gradient, places, tolerance)):
            found = attrs.evolve(found, evidence=f"{astray}; {found.evidence}")
        if reference_gradient is None and found.kind == RIGHT and any(value is not None for value in values):
            zeros.append(name)
        verdicts[name] = found
    return AuditReport(len(batches), verdicts, tuple(drifted), tuple(zeros))


def _equal_copies(values: Sequence[torch.Tensor | None], places: Sequence[_Where]) -> bool:
    """Whether ranks that hold the same part hold the same values, to the bit."""
    first: dict[_Where, torch.Tensor | None] = {}
    for value, place in zip(values, places, strict=True):
        known = first.setdefault(place, value)
        if known is value:
            continue
        if known is None or value is None or not torch.equal(known, value):
            return False
    return True


def _named(gradients: Mapping[str, torch.Tensor | None], names: Any) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for raw, gradient in gradients.items():
        name = logical_name(raw)
        if names is not None:
            name = names(name) if callable(names) else names.get(name, name)
        found[name] = None if gradient is None else whole_here(gradient)
    return found


def whole_here(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as this rank would apply it: shards are gathered; copies and pending terms stay this rank's own."""
    if not isinstance(gradient, DTensor):
        return gradient.detach().to("cpu", copy=True)  # a later window may write over it
    local = gradient.to_local()
    # a pending term is what the optimizer would see, so it is not summed here
    own = [Replicate() if isinstance(placement, Partial) else placement for placement in gradient.placements]
    if any(isinstance(placement, Shard) for placement in own):
        local = DTensor.from_local(
            local, gradient.device_mesh, own, run_check=False, shape=gradient.shape, stride=gradient.stride()
        ).full_tensor()
    return local.detach().cpu()


def _gathered(mine: dict[str, torch.Tensor | None]) -> list[dict[str, torch.Tensor | None]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


_Where = tuple[int, int, int]
"""Dim, number of slices, index; number 1 for the whole tensor."""

_WHOLE = (0, 1, 0)


def _places(values: Sequence[torch.Tensor | None], whole: torch.Tensor | None, tolerance: float) -> list[_Where] | str:
    """Which slice of the reference each rank is to hold, or why there is no telling.

    Each slice goes to equally many ranks, whatever their gradients are: what two ranks hold alike, and nobody else holds, is
    wrong on one of them.
    """
    cuts = [_cut(value, whole) for value in values]
    cut_up = next((cut for cut in cuts if cut is not None and cut[1] > 1), _WHOLE[:2])
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank, (value, cut) in enumerate(zip(values, cuts, strict=True)):
        if cut is None:
            return "its shape is no slice of the reference's"
        ranks_of.setdefault(cut_up if value is None else cut, []).append(rank)
    places = [_WHOLE] * len(values)
    for (dim, number), ranks in ranks_of.items():
        if whole is None or number == 1:
            continue
        if len(ranks) % number:
            return f"ranks {', '.join(map(str, ranks))} hold 1/{number} of it each: not every slice is held, and by equally many"
        scores = _scores([values[rank] for rank in ranks], whole.chunk(number, dim), tolerance)
        for rank, index in zip(ranks, _dealt(scores, number), strict=True):
            places[rank] = dim, number, index
    return places


def _cut(value: torch.Tensor | None, whole: torch.Tensor | None) -> tuple[int, int] | None:
    """Dim and number of slices that a shape speaks of."""
    if value is None or whole is None or value.shape == whole.shape:
        return _WHOLE[:2]
    dims = [dim for dim, (a, b) in enumerate(zip(value.shape, whole.shape, strict=False)) if a != b]
    if value.dim() != whole.dim() or len(dims) != 1 or not value.shape[dims[0]] or whole.shape[dims[0]] % value.shape[dims[0]]:
        return None
    return dims[0], whole.shape[dims[0]] // value.shape[dims[0]]


def _scores(values: Sequence[torch.Tensor | None], pieces: Sequence[torch.Tensor], tolerance: float) -> list[list[float]]:
    """How much each rank's gradient looks like each slice: the cosine, which no factor changes, and 1 more where it is right.

    The cosine alone does not tell zeros from anything, nor slices that differ by a factor.
    """
    seen = torch.stack([(torch.zeros_like(pieces[0]) if value is None else value).flatten().double() for value in values])
    wanted = torch.stack([piece.flatten().double() for piece in pieces])
    products, seen_squares, squares = seen @ wanted.T, seen.square().sum(1, keepdim=True), wanted.square().sum(1)
    cosines = products / (seen_squares.sqrt() * squares.sqrt()).clamp_min(1e-300)
    errors = ((seen_squares - 2 * products + squares).clamp_min(0.0) / torch.where(squares > 0, squares, 1.0)).sqrt()
    # below 1e-7, squares of doubles cancel
    scores = cosines + (errors <= max(tolerance, 1e-7)).double()
    found: list[list[float]] = scores.nan_to_num(0.0, 0.0, 0.0).tolist()
    return found


def _dealt(scores: Sequence[Sequence[float]], number: int) -> list[int]:
    """A slice for each rank, each slice to equally many, with the largest sum of scores; in an order of a mesh where that is as good."""
    copies = len(scores) // number
    steps = [step for step in range(1, copies + 1) if copies % step == 0]  # ranks between neighbouring slices
    orders = [[rank // step % number for rank in range(len(scores))] for step in steps]
    dealt = max(orders, key=lambda order: sum(scores[rank][index] for rank, index in enumerate(order)))
    while _exchange(scores, dealt, number):
        pass
    return dealt


def _exchange(scores: Sequence[Sequence[float]], dealt: list[int], number: int) -> bool:
    """Let ranks pass their slices on around a ring, if one raises the sum; where none does, no other deal is better."""
    gains = {
        (old, new): max((scores[rank][new] - scores[rank][old], rank) for rank, index in enumerate(dealt) if index == old)
        for old, new in itertools.permutations(range(number), 2)
    }
    lengths, before = [0.0] * number, [-1] * number
    for _ in range(number):
        last = -1
        for (old, new), (gain, _rank) in gains.items():
            if lengths[old] + gain > lengths[new] + 1e-9:  # rounding is no reason to leave the order of the ranks
                lengths[new], before[new], last = lengths[old] + gain, old, new
        if last < 0:
            return False
    for _ in range(number):  # whatever still grows after as many rounds as slices hangs on a ring
        last = before[last]
    first = last
    while True:
        dealt[gains[before[last], last][1]] = last
        last = before[last]
        if last == first:
            return True


def _astray(values: Sequence[torch.Tensor | None], whole: torch.Tensor | None, places: Sequence[_Where], tolerance: float) -> str:
    """Which ranks hold something else than their slice, in words; empty where nothing is sliced."""
    said = []
    for rank, (value, place) in enumerate(zip(values, places, strict=True)):
        dim, number, index = place
        if number == 1 or relative_error(value, _like(whole, place)) <= tolerance:
            continue
        others = [n for n in range(number) if n != index and relative_error(value, _like(whole, (dim, number, n))) <= tolerance]
        said.append(
            f"rank {rank} holds slice {others[0]} along dim {dim}, and slice {index} is left for it"
            if others
            else f"rank {rank} holds something else than slice {index} along dim {dim}"
        )
    return "; ".join(said)


def _like(whole: torch.Tensor | None, where: _Where) -> torch.Tensor | None:
    dim, number, index = where
    return whole if whole is None or number == 1 else whole.chunk(number, dim)[index]

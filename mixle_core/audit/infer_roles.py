"""What one parameter is: where a rank's values lie in the whole, and whether its gradient before reduction is whole or a term."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mixle_core.audit.classify import classify, default_groups
from mixle_core.audit.compare import relative_error
from mixle_core.audit.infer_boundaries import Passed
from mixle_core.audit.infer_slices import Cut, close, lie, locate, piece
from mixle_core.audit.infer_trace import Forward, Trace, portable, traced
from mixle_core.errors import UsageError
from mixle_core.layout import Lie, Replica, Role, Shard

_NOTHING = 1e-6
"""A gradient so much smaller than the largest one is rounding, and decides nothing."""


@attrs.frozen
class ParameterFinding:
    """What one parameter is on the axis.

    Args:
        role: None where no role says it.
        evidence: the numbers that say so, in words.
    """

    role: Role | None
    evidence: str


def gathered(mine: Any) -> list[Any]:
    """What every rank has, in their order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


Weight = Replica | Cut


def weight_of(name: str, pieces: Sequence[torch.Tensor | None], whole: torch.Tensor) -> Weight | str:
    """What the ranks hold of one parameter, or the line that refuses it."""
    holders = tuple(rank for rank, values in enumerate(pieces) if values is not None)
    there = [values for values in pieces if values is not None]
    if not there:
        return f"{name}: no rank of the parallel model holds a parameter of this name"
    if all(values.shape == whole.shape for values in there):
        odd = [rank for rank, values in zip(holders, there, strict=True) if not torch.equal(values, whole)]
        if odd:
            error = relative_error(there[holders.index(odd[0])], whole)
            return f"{name}: rank {odd[0]} holds other values than the reference (relative error {error:.3g}): neither a copy nor a slice"
        return Replica(ranks=None if len(holders) == len(pieces) else holders)
    if len(there) < len(pieces):
        return f"{name}: ranks {list(holders)} hold slices and the others nothing; a slice lies on every rank"
    cut = locate(there, whole)
    return f"{name}: {cut}" if isinstance(cut, str) else cut


@attrs.define
class Measurement:
    """Batches run through both models: gradients before reduction, and what passes between modules."""

    model: nn.Module
    reference: nn.Module
    forward: Forward
    tolerance: float
    traces: list[Trace] = attrs.field(factory=list)
    gradients: list[list[dict[str, torch.Tensor | None]]] = attrs.field(factory=list)
    passed: list[list[Passed]] = attrs.field(factory=list)
    outputs: list[Lie] = attrs.field(factory=list)

    def add(self, batch: Any) -> None:
        """Run one batch. Collective."""
        index, number, rank = len(self.traces), dist.get_world_size(), dist.get_rank()

        def seed(whole: torch.Tensor) -> torch.Tensor:
            return torch.randn(whole.shape, generator=torch.Generator().manual_seed(index))

        mine = traced(self.reference, self.forward, batch, seed, follow=True)
        assert mine.output is not None
        whole = mine.output.value

        def share(local: torch.Tensor) -> torch.Tensor:
            values = gathered(local)
            found = lie(values, [None] * number, whole, None, (), self.tolerance)
            if found is None:
                errors = ", ".join(f"{relative_error(value, whole):.3g}" for value in values)
                raise UsageError(
                    f"infer_layout: the parallel model returns shape {list(local.shape)} and other values than the reference's "
                    f"{list(whole.shape)} (relative errors of the ranks {errors}); expected the same weights and no randomness"
                )
            self.outputs.append(found)
            return piece(seed(whole), found.dim, found.parts, number, rank) if isinstance(found, Shard) else seed(whole)

        theirs = traced(self.model, self.forward, batch, share)
        everyone = gathered((theirs.gradients, portable(theirs)))
        self.traces.append(mine)
        self.gradients.append([gradients for gradients, _ in everyone])
        self.passed.append([passed for _, passed in everyone])

    def undecided(self, names: Iterable[str]) -> bool:
        """Whether some parameter had no gradient so far."""
        return any(not self.deciding(name) for name in names)

    def deciding(self, name: str) -> list[int]:
        """The batches in which one process has a gradient of the parameter."""
        return [index for index, trace in enumerate(self.traces) if self._size(trace, name) > _NOTHING * self._largest(trace)]

    def _size(self, trace: Trace, name: str) -> float:
        gradient = trace.gradients[name]
        return 0.0 if gradient is None else float(gradient.double().square().mean().sqrt())

    def _largest(self, trace: Trace) -> float:
        return max(self._size(trace, name) for name in trace.gradients)


def finding(measurement: Measurement, name: str, weight: Weight) -> ParameterFinding:
    """The role of one parameter from its values and from its gradients in all batches."""
    deciding = measurement.deciding(name)
    if isinstance(weight, Cut):
        return _slice(measurement, name, weight, deciding)
    holders = range(dist.get_world_size()) if weight.ranks is None else weight.ranks
    if not deciding:
        return ParameterFinding(weight, f"undecided: one process has no gradient of it in {len(measurement.traces)} batches")
    kinds, lines = set(), []
    for index in deciding:
        wanted = measurement.traces[index].gradients[name]
        values = [measurement.gradients[index][rank].get(name) for rank in holders]
        assert wanted is not None
        kind, line = _copy(values, wanted, measurement.tolerance)
        kinds.add(kind)
        lines.append(line)
    if len(kinds) > 1:
        return ParameterFinding(None, f"its gradient is not the same kind in every batch: {'; '.join(dict.fromkeys(lines))}")
    (kind,) = kinds
    role = {"complete": Replica("complete", weight.ranks), "partial": Replica("partial", weight.ranks)}.get(kind)
    return ParameterFinding(role, lines[0])


def _copy(values: Sequence[torch.Tensor | None], wanted: torch.Tensor, tolerance: float) -> tuple[str, str]:
    """Kind of a copy's gradient, and the numbers."""
    if all(value is None or not float(value.norm()) for value in values):
        return "never", "never trained: no rank has a gradient, one process has one"
    filled = [torch.zeros_like(wanted) if value is None else value for value in values]
    if any(value.shape != wanted.shape for value in filled):
        return "shape", f"gradients of shape {list(filled[0].shape)}, expected {list(wanted.shape)}"
    errors = [relative_error(value, wanted) for value in filled]
    if max(errors) <= tolerance:
        return "complete", f"every rank has the whole gradient (error {max(errors):.0e})"
    total = torch.stack([value.double() for value in filled]).sum(0)
    if relative_error(total, wanted) <= tolerance:
        return "partial", f"the ranks' gradients add up (error {relative_error(total, wanted):.0e}; one rank alone {min(errors):.1g})"
    for which, blocks in default_groups(len(filled)).items():
        sums = [torch.stack([filled[rank].double() for rank in ranks]).sum(0) for ranks in blocks]
        if len(blocks) > 1 and close(sums, [wanted.double()] * len(sums), tolerance):
            return "subgroup", f"gradients add up over a subgroup only, ranks {which}; a role is about all {len(filled)} ranks"
    verdict = classify(filled, [wanted] * len(filled), tolerance=tolerance)
    return "odd", f"its gradient is neither whole nor a term: {verdict.kind}; {verdict.evidence}"


def _slice(measurement: Measurement, name: str, cut: Cut, deciding: Sequence[int]) -> ParameterFinding:
    """Parts of a slice that its values leave open, from its gradient; the gradient has to be that of the slice."""
    number = dist.get_world_size()
    errors: dict[tuple[int, ...] | None, float] = {}
    shown = None
    for parts in cut.parts:
        pairs = []
        for index in deciding:
            wanted = measurement.traces[index].gradients[name]
            assert wanted is not None
            mine = [piece(wanted, cut.dim, parts, number, rank) for rank in range(number)]
            given = [ranks.get(name) for ranks in measurement.gradients[index]]
            pairs.append(([_own(value, cut.dim, parts, mine[rank].shape, rank, number) for rank, value in enumerate(given)], mine))
        errors[parts] = max(
            (relative_error(value, want) for found, mine in pairs for value, want in zip(found, mine, strict=True)), default=0.0
        )
        shown = shown or (pairs[0] if pairs else None)
    parts = min(errors, key=lambda key: errors[key])
    what = f"slices of dim {cut.dim}" + (f", of parts {list(parts)}" if parts else "")
    if not deciding:
        return ParameterFinding(Shard(cut.dim, parts=parts), f"{what}; one process has no gradient of it")
    if errors[parts] > measurement.tolerance and shown is not None:
        verdict = classify(*shown, tolerance=measurement.tolerance)
        return ParameterFinding(None, f"{what}, and its gradient is not that of the slice: {verdict.kind}; {verdict.evidence}")
    return ParameterFinding(Shard(cut.dim, parts=parts), f"{what}, with its own gradient (error {errors[parts]:.0e})")


def _own(
    value: torch.Tensor | None, dim: int, parts: tuple[int, ...] | None, shape: torch.Size, rank: int, number: int
) -> torch.Tensor | None:
    """The gradient of a rank's slice, of which some ranks hold the whole (a DTensor that is not cut yet)."""
    if value is None:
        return torch.zeros(shape)
    return value if value.shape == shape or value.shape[dim] == shape[dim] else piece(value, dim, parts, number, rank)

"""The boundary collectives: each pair of lies is one collective in the forward and its transpose in the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mixle_core import CapabilityError, Replica, Shard, Term, UsageError
from mixle_core.runtime import reduce_scatter

Convert = Callable[[torch.Tensor], torch.Tensor]


def _sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    values = values.contiguous().clone()
    dist.all_reduce(values, group=group)
    return values


def _gather(values: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    values = values.contiguous()
    pieces = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, values, group=group)
    return torch.cat(pieces, dim)


def _cut(values: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return _pieces(values, dim, group)[dist.get_rank(group)].contiguous()


def _pieces(values: torch.Tensor, dim: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    number = dist.get_world_size(group)
    if values.shape[dim] % number:
        raise UsageError(
            f"an activation of shape {list(values.shape)} is cut along dim {dim}, whose length {values.shape[dim]} is not divisible by "
            f"tp={number}; pad the batch to a multiple of {number}"
        )
    return values.chunk(number, dim)


def _sum_and_cut(values: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    pieces = _pieces(values, dim, group)
    out = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
    reduce_scatter(out, torch.cat(pieces), group)
    return out


def _function(
    name: str,
    forward: Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor],
    backward: Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor],
) -> type[torch.autograd.Function]:
    def run_forward(ctx: Any, values: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return forward(values, dim, group)

    def run_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return backward(gradient, ctx.dim, ctx.group), None, None

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)})


def _same(values: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return values.view_as(values)


_CONVERSIONS: dict[tuple[str, str], type[torch.autograd.Function]] = {
    ("complete", "partial"): _function("CopyIn", _same, lambda g, dim, group: _sum(g, group)),
    ("complete", "shard"): _function("Split", _cut, _gather),
    ("shard", "partial"): _function("GatherIn", _gather, _sum_and_cut),
    ("shard", "complete"): _function("GatherOut", _gather, _cut),
    ("term", "complete"): _function("SumOut", lambda v, dim, group: _sum(v, group), _same),
    ("term", "partial"): _function("SumBoth", lambda v, dim, group: _sum(v, group), lambda g, dim, group: _sum(g, group)),
    ("term", "shard"): _function("SumAndSplit", _sum_and_cut, _gather),
}


def _kind(lie: Replica | Shard | Term) -> str:
    if isinstance(lie, Replica):
        return lie.gradient
    return "shard" if isinstance(lie, Shard) else "term"


def conversion(source: Replica | Shard | Term, target: Replica | Shard | Term, group: dist.ProcessGroup, where: str) -> Convert | None:
    """The function that turns an activation lying as `source` into one lying as `target`; None when nothing is to do.

    Raises:
        CapabilityError: no exact conversion exists between the two.
    """
    if source == target:
        return None
    function = _CONVERSIONS.get((_kind(source), _kind(target)))
    if function is None:
        raise CapabilityError(
            f"{where}: no exact conversion from {source} to {target}; the pairs that exist: "
            + ", ".join(f"{a} to {b}" for a, b in _CONVERSIONS)
        )
    cuts = [lie for lie in (source, target) if isinstance(lie, Shard)]
    if any(cut.unit != 1 or cut.parts is not None for cut in cuts):
        raise CapabilityError(f"{where}: an activation is cut into equal slices; declare Shard(dim) without unit and parts")
    dim = cuts[0].dim if cuts else 0
    return lambda values: function.apply(values, dim, group)

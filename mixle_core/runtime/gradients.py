"""The one object that scaling, norm, the non-finite decision and clipping read: the reduced gradients of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from mixle_core.receipts import Gradient, OwnerReceipt
from mixle_core.runtime.groups import Mesh

_COALESCE_BYTES = 256 * 2**20


def _power_sum(tensors: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype | None = None) -> float:
    """Sum of |x|**norm_type over `tensors` (their maximum for inf)."""
    used = [tensor if dtype is None else tensor.to(dtype) for tensor in tensors if tensor.numel()]
    if not used:
        return 0.0
    norm = float(torch.nn.utils.get_total_norm(used, norm_type))
    return norm if norm_type == math.inf else norm**norm_type


def local_power_sum(gradients: Iterable[Gradient], norm_type: float = 2.0) -> float:
    """This rank's share of the global power sum: every distinct value counted once over all ranks.

    For inf, the local maximum. The result is not finite exactly when a gradient is not.
    """
    by_weight: dict[float, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.tensor is not None:
            by_weight.setdefault(gradient.weight, []).append(gradient.tensor)
    if norm_type == math.inf:
        return max((_power_sum(tensors, norm_type) for tensors in by_weight.values()), default=0.0)
    total = 0.0
    for weight, tensors in sorted(by_weight.items()):
        share = _power_sum(tensors, norm_type)
        if not math.isfinite(share):  # large finite values overflow the square in their own precision
            share = _power_sum(tensors, norm_type, torch.float64)
        total += weight * share
    return total


class Reduced:
    """The final gradients of one update on this rank, scaled to the mean over all loss tokens.

    Args:
        gradients: logical name -> gradient, as the owners handed them over.
        square_sum: global sum of squares, before scaling.
        scale: factor that turned summed into mean gradients; already applied, as is `clip_factor`.
        num_tokens: loss tokens of the whole update, over all data ranks.
        num_examples: rows of the whole update, over all data ranks, as far as `finish` was told.
        loss: mean loss per token, over all data ranks.
        nonfinite: names of parameters with a non-finite gradient on any rank.
        skipped: why no optimizer may step, or None.
    """

    def __init__(
        self,
        gradients: Mapping[str, Gradient],
        mesh: Mesh,
        *,
        square_sum: float,
        scale: float,
        num_tokens: int,
        loss: float,
        clip_factor: float = 1.0,
        num_examples: int = 0,
        nonfinite: tuple[str, ...] = (),
        skipped: str | None = None,
        owners: tuple[OwnerReceipt, ...] = (),
    ) -> None:
        self._gradients = gradients
        self._mesh = mesh
        self.num_tokens = num_tokens
        self.num_examples = num_examples
        self.loss = loss
        self.nonfinite = nonfinite
        self.skipped = skipped
        self.owners = owners
        self.clip_factor = clip_factor
        self._grad_norm = math.sqrt(square_sum) * scale if math.isfinite(square_sum) else square_sum

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Logical name -> final local gradient (per rank; slices where the table says so), None where nobody used it."""
        return {name: gradient.tensor for name, gradient in self._gradients.items()}

    @property
    def finite(self) -> bool:
        """Whether every rank's gradients are finite; the same on every rank."""
        return not self.nonfinite

    def norm(self, norm_type: float = 2.0) -> float:
        """Global norm of all gradients, equal on every rank. Other types than 2 cost one small collective.

        For 2 it is the norm before clipping, for others that of the gradients as they are now.
        """
        if norm_type == 2.0:
            return self._grad_norm
        share = torch.tensor([local_power_sum(self._gradients.values(), norm_type)], dtype=torch.float64)
        if norm_type == math.inf:
            return float(self._mesh.all_reduce_control(share, dist.ReduceOp.MAX))
        return float(float(self._mesh.all_reduce_control(share)) ** (1.0 / norm_type))

    def clip_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients in place so that their global norm is at most `max_norm`; return the factor so far.

        Gradients that are not finite are left alone: check `skipped` before the optimizer steps.
        """
        norm = self.norm(norm_type) * (self.clip_factor if norm_type == 2.0 else 1.0)
        if self.skipped is None and norm > max_norm:
            self.clip_factor *= max_norm / norm
            multiply_(self._gradients.values(), max_norm / norm)
        return self.clip_factor


def multiply_(gradients: Iterable[Gradient], factor: float) -> None:
    """Scale gradients in place, device and dtype at a time."""
    if factor == 1.0:
        return
    tensors = [gradient.tensor for gradient in gradients if gradient.tensor is not None and gradient.tensor.numel()]
    if tensors:
        torch._foreach_mul_(tensors, factor)


def reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    bucket_bytes: int = _COALESCE_BYTES,
    announce: Callable[[Sequence[int], int], None] | None = None,
) -> None:
    """Sum `tensors` over `group` in place, in as few all-reduces as `bucket_bytes` allows; half precision travels as fp32.

    Args:
        tensors: per rank; equal shapes and order on every rank of the group. Empty ones are passed over.
        announce: told of each collective before it is made: the places of its tensors and its payload, as `Mesh.announcer` gives it.
    """
    if group is None:
        return
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        by_kind.setdefault((tensor.device, dtype), []).append(place)
    for (_, dtype), same in by_kind.items():
        for places in _buckets(tensors, same, bucket_bytes, dtype.itemsize):
            bucket = [tensors[place] for place in places]
            if announce is not None:
                announce(places, sum(tensor.numel() for tensor in bucket) * dtype.itemsize)
            if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].dtype == dtype:
                dist.all_reduce(bucket[0], group=group)
                continue
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            pieces = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [piece.view(tensor.shape) for piece, tensor in zip(pieces, bucket, strict=True)])


def _buckets(tensors: Sequence[torch.Tensor], places: Sequence[int], limit: int, itemsize: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    size = limit
    for place in places:
        tensor = tensors[place]
        if not tensor.numel():
            continue
        if size >= limit:  # full once the limit is reached, as in DistributedDataParallel: never more calls than there
            buckets.append([])
            size = 0
        buckets[-1].append(place)
        size += tensor.numel() * itemsize
    return buckets

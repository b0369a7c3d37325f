"""mixle's session and the loops one writes by hand, behind one small interface, on the same ranks and process groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import attrs
import hand_tp
import qwen
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import mixle_core as mx

DATA, TP_GRADIENTS, TP_FORWARD, CONTROL = "bench:data", "bench:tp.gradients", "bench:tp.forward", "bench:control"


@attrs.frozen
class Job:
    """What every contender of a layout is built from; `folder` is for weights that a library reads from a directory."""

    size: str
    plan: mx.ParallelPlan
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    max_norm: float = 1.0
    accumulation: int = 1
    folder: str = ""

    @property
    def data_rank(self) -> int:
        return dist.get_rank() // self.plan.tp

    def batches(self, number: int) -> list[torch.Tensor]:
        return [qwen.batch(self.size, number + extra, self.data_rank) for extra in range(self.accumulation)]


@functools.cache
def group(description: str, axes: str) -> dist.ProcessGroup:
    """This rank's group over `axes` ("data", "tp" or "world"), made once; `sizes` must have been called."""
    world, tp = dist.get_world_size(), _sizes["tp"]
    lists = {
        "data": [list(range(first, world, tp)) for first in range(tp)],
        "tp": [list(range(first, first + tp)) for first in range(0, world, tp)],
        "world": [list(range(world))],
    }[axes]
    made = {tuple(ranks): dist.new_group(ranks, group_desc=description) for ranks in lists}
    return next(found for ranks, found in made.items() if dist.get_rank() in ranks)


_sizes = {"tp": 1}


def sizes(plan: mx.ParallelPlan) -> None:
    """Say how the ranks lie, before the first group."""
    _sizes["tp"] = plan.tp


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def whole(parameter: torch.Tensor, tp_dim: int | None) -> torch.Tensor:
    """The full tensor. Collective."""
    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    if tp_dim is None:
        return tensor.clone()
    pieces = [torch.empty_like(tensor) for _ in range(_sizes["tp"])]
    dist.all_gather(pieces, tensor.contiguous(), group=group(CONTROL, "tp"))
    return torch.cat(pieces, tp_dim)


class Mixle:
    """`mx.prepare` and `train_batch`."""

    name = "mixle"

    def __init__(self, job: Job) -> None:
        plan = attrs.evolve(job.plan, gradient_accumulation_steps=job.accumulation)
        self.session = mx.prepare(
            qwen.build(job.size), plan, loss=qwen.summed_loss, optimizer=job.optimizer, max_grad_norm=job.max_norm, seed=0
        )
        self.optimizers = list(self.session.optimizers.values())
        self.norm = 0.0

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for ids in batches:
            receipt = self.session.train_batch(ids)
        self.norm = receipt.grad_norm

    def parameters(self) -> dict[str, torch.Tensor]:
        table = self.session.reduction.table
        dims = {row.name: getattr(row.roles.get("tp"), "dim", None) for row in table.rows}
        return {name: whole(parameter, dims[name]) for name, parameter in self.session.reduction.named_parameters()}

    def close(self) -> None:
        self.session.close()


class Loop:
    """A loop by hand: backwards, one flat sum of what is partial on tp, one norm, clipping, step.

    Args:
        module: to call. Its gradients are means over the data ranks after the last backward.
        model: whose parameters are trained, by their own names.
        set_sync: called before each backward's forward with whether it is the last of the update.
        cut_dims: name -> dim of plain tensors that are slices over tp.
        partial: names whose gradients are summed over tp before the step.
        norm_axes: the ranks over which anything is cut ("data", "tp" or "world"); None when nothing is.
    """

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        model: nn.Module,
        set_sync: Callable[[bool], None] = lambda last: None,
        *,
        cut_dims: dict[str, int] | None = None,
        partial: Iterable[str] = (),
        norm_axes: str | None = None,
    ) -> None:
        self._job, self._module, self._set_sync = job, module, set_sync
        self._named = dict(model.named_parameters())
        self._cut_dims = cut_dims or {}
        self._partial = [self._named[name] for name in partial]
        self._norm_group = group(CONTROL, norm_axes) if norm_axes else None
        members = dist.get_world_size(self._norm_group) if self._norm_group else 1
        self._by_weight: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self._named.items():
            self._by_weight.setdefault(self._slices(name, parameter) / members, []).append(parameter)
        self.optimizers = [job.optimizer(list(self._named.values()))]
        self.norm = 0.0

    def _slices(self, name: str, parameter: torch.Tensor) -> int:
        """Number of distinct slices of a parameter over all ranks."""
        number = self._job.plan.tp if name in self._cut_dims else 1
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                number *= 1 if placement.is_replicate() else parameter.device_mesh.size(axis)
        return number

    def step(self, batches: Sequence[torch.Tensor]) -> None:
        for index, ids in enumerate(batches):
            self._set_sync(index == len(batches) - 1)
            loss, tokens = qwen.summed_loss(self._module, ids)
            self._backward(loss / (tokens * len(batches)))
        if self._partial:
            self._sum_partial()
        self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @torch.no_grad()
    def _sum_partial(self) -> None:
        gradients = [local(parameter.grad) for parameter in self._partial]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=group(TP_GRADIENTS, "tp"))
        pieces = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [piece.view_as(gradient) for piece, gradient in zip(pieces, gradients, strict=True)])

    @torch.no_grad()
    def _clip(self) -> None:
        """On local tensors with one all-reduce: `clip_grad_norm_` over DTensors is slower, and refuses parameters on two meshes."""
        square, every = 0.0, []
        for weight, parameters in self._by_weight.items():
            gradients = [gradient for parameter in parameters if (gradient := local(parameter.grad)).numel()]
            every += gradients
            square += weight * float(torch.nn.utils.get_total_norm(gradients)) ** 2
        if self._norm_group is not None:
            shared = torch.tensor([square], dtype=torch.float64)
            dist.all_reduce(shared, group=self._norm_group)
            square = float(shared)
        self.norm = math.sqrt(square)
        if self.norm > self._job.max_norm:
            torch._foreach_mul_(every, self._job.max_norm / self.norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: whole(parameter, self._cut_dims.get(name)) for name, parameter in self._named.items()}

    def close(self) -> None:
        self.optimizers = []


def _prepared(job: Job) -> tuple[nn.Module, dict[str, int], list[str]]:
    """The model, cut by hand where the plan has tp; the dims of its slices; the names that are partial on tp."""
    model = qwen.build(job.size)
    if job.plan.tp == 1:
        return model, {}, []
    dims = hand_tp.cut(model, group(TP_FORWARD, "tp"))
    return model, dims, [name for name, _ in model.named_parameters() if hand_tp.is_partial(name)]


class HandTP(Loop):
    """Slices by hand, no data axis."""

    name = "by hand: local TP"

    def __init__(self, job: Job) -> None:
        model, dims, partial = _prepared(job)
        super().__init__(job, model, model, cut_dims=dims, partial=partial, norm_axes="tp")


class HandDDP(Loop):
    """DistributedDataParallel over dp, slices by hand over tp where there is one."""

    name = "by hand: DDP"

    def __init__(self, job: Job) -> None:
        model, dims, partial = _prepared(job)
        ddp = DistributedDataParallel(model, process_group=group(DATA, "data"), forward_sync_buffers=False, gradient_as_bucket_view=True)
        super().__init__(
            job,
            ddp,
            model,
            lambda last: setattr(ddp, "require_backward_grad_sync", last),
            cut_dims=dims,
            partial=partial,
            norm_axes="tp" if dims else None,
        )


class HandFSDP(Loop):
    """fully_shard of each layer and of the rest over dp, slices by hand over tp where there is one."""

    name = "by hand: fully_shard"

    def __init__(self, job: Job) -> None:
        model, dims, partial = _prepared(job)
        mesh = DeviceMesh.from_group(group(DATA, "data"), "cpu", mesh_dim_names=("dp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(
            job, model, model, model.set_requires_gradient_sync, cut_dims=dims, partial=partial, norm_axes="world" if dims else "data"
        )

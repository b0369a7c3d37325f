"""Measurements of megatron-fsdp against one process in fp32. Every function is called on every rank of a process group.

Relative errors are the norm of the difference over the norm of the reference, per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mixle_megatron_fsdp._upstream import backward_of, counted_calls, installed_gradients, policy, sharded_parameters, wrap
from mixle_megatron_fsdp.models import TOKENS, Block, decoder, sequence_model, squared_output, summed_loss

LEARNING_RATE = 0.1


@attrs.frozen
class Found:
    """What a composition did; NaN is what was not measured.

    Args:
        gradients: parameter -> relative error of its gradient, the worst of all updates.
        apart: parameter -> relative difference of its gradients on two tp ranks.
        norm: relative error of the global norm, the worst of all updates.
        parameters: relative error of the parameters after the last update, the worst of them.
        reductions: calls in the last update, of one rank.
        dtypes: that these calls sent.
    """

    gradients: Mapping[str, float]
    apart: Mapping[str, float] = attrs.field(factory=dict)
    norm: float = float("nan")
    parameters: float = float("nan")
    reductions: int = 0
    dtypes: frozenset[str] = frozenset()

    @property
    def worst(self) -> float:
        """The largest relative error of a gradient."""
        return max(self.gradients.values())


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Infinite where the shapes differ, so that nothing passes by being absent."""
    value, reference = value.detach().double().cpu().flatten(), reference.detach().double().cpu().flatten()
    if value.shape != reference.shape or not bool(value.isfinite().all()):
        return float("inf")
    return float((value - reference).norm() / reference.norm().clamp_min(1e-30))


def whole(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole flat tensor: parts are contiguous, in the order of the group's ranks."""
    parts: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size(group)
    dist.all_gather_object(parts, part.cpu(), group=group)
    return torch.cat([each.float() for each in parts])


def _device(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _data_mesh(kind: str, replicas: int) -> tuple[DeviceMesh, dict[str, object]]:
    """The mesh, with the tp dimension of size 1 that megatron-fsdp asks for, and what HSDP needs beside it."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(kind, (ranks, 1), mesh_dim_names=("dp", "tp")), {}
    mesh = init_device_mesh(kind, (replicas, ranks // replicas, 1), mesh_dim_names=("outer", "dp", "tp"))
    return mesh, {"dp_outer_dim": "outer", "hybrid_fsdp_group": dist.group.WORLD}


def data_parallel(
    kind: str,
    *,
    backwards: int = 1,
    strategy: str = "optim_grads_params",
    auto_sync: bool = False,
    no_sync: bool = True,
    replicas: int = 1,
    updates: int = 3,
    tied: bool = False,
    average: bool = False,
) -> Found:
    """`updates` SGD steps in fp32 over all ranks, beside one process on the same tokens.

    Args:
        kind: device type of the mesh, "cpu" or "cuda".
        strategy: megatron-fsdp's `zero_dp_strategy`.
        auto_sync: its `sync_model_each_microbatch`, which is True by default.
        no_sync: run all backwards but the last inside its `no_sync()`.
        replicas: of the shards: HSDP above 1.
        average: leave the mean over the ranks to megatron-fsdp, as it does by default (a PREMUL_SUM), and undo it.
    """
    mesh, more = _data_mesh(kind, replicas)
    group, device, ranks = mesh["dp"].get_group(), _device(kind), dist.get_world_size()
    reference = decoder(tied=tied).to(device)
    wrapped = wrap(
        decoder(tied=tied), mesh, [nn.Sequential], average=average, zero_dp_strategy=strategy, sync_model_each_microbatch=auto_sync, **more
    )
    errors, norm, tokens = dict.fromkeys((name for name, _ in reference.named_parameters()), 0.0), 0.0, backwards * ranks * TOKENS
    for update in range(updates):
        with counted_calls() as calls:
            for backward in range(backwards):
                with backward_of(wrapped, last=backward == backwards - 1, no_sync=no_sync):
                    summed_loss(wrapped, update, backward, dist.get_rank(), device).backward()
            if not auto_sync:
                wrapped.finish_grad_sync()
        for backward in range(backwards):
            for rank in range(ranks):
                summed_loss(reference, update, backward, rank, device).backward()
        scale = ranks if average else 1
        got = {
            name: (part if strategy == "no_shard" else whole(part, group)) * scale
            for name, (_, part) in installed_gradients(wrapped).items()
        }
        wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
        errors = {name: max(errors[name], relative(got[name], wanted[name])) for name in errors}
        norm = max(norm, relative(_norm(got), _norm(wanted)))
        with torch.no_grad():
            for parameter in wrapped.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE * scale / tokens)
            for name, parameter in reference.named_parameters():
                parameter.sub_(wanted[name], alpha=LEARNING_RATE / tokens)
        wrapped.install_optimized_model_weights()
        wrapped.zero_grad_buffer()
        reference.zero_grad()
    kept = {name: part if strategy == "no_shard" else whole(part, group) for name, part in sharded_parameters(wrapped).items()}
    after = max(relative(kept[name], parameter) for name, parameter in reference.named_parameters())
    return Found(errors, norm=norm, parameters=after, reductions=calls.reductions, dtypes=frozenset(calls.dtypes))


def _norm(gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    norm: torch.Tensor = torch.stack([gradient.detach().double().cpu().norm() for gradient in gradients.values()]).norm()
    return norm


def half_precision(kind: str, *, backwards: int, main_grads: torch.dtype | None = None, comm: torch.dtype | None = None) -> Found:
    """A bf16 model; the reference is the sum in fp32 of the same bf16 gradients of every backward and rank."""
    mesh, _ = _data_mesh(kind, 1)
    group, device = mesh["dp"].get_group(), _device(kind)
    twin = decoder().bfloat16().to(device)
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in twin.named_parameters()}
    for backward in range(backwards):
        for rank in range(dist.get_world_size()):
            summed_loss(twin, 0, backward, rank, device).backward()
            for name, parameter in twin.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad.float()
            twin.zero_grad()
    wrapped = wrap(
        decoder().bfloat16(), mesh, [nn.Sequential], sync_model_each_microbatch=False, mixed_precision_policy=policy(main_grads, comm)
    )
    with counted_calls() as calls:
        for backward in range(backwards):
            with backward_of(wrapped, last=backward == backwards - 1, no_sync=True):
                summed_loss(wrapped, 0, backward, dist.get_rank(), device).backward()
        wrapped.finish_grad_sync()
    errors = {name: relative(whole(part, group), sums[name]) for name, (_, part) in installed_gradients(wrapped).items()}
    return Found(errors, reductions=calls.reductions, dtypes=frozenset(calls.dtypes))


def tensor_parallel(kind: str, *, rowwise: bool = False) -> Found:
    """One backward with dp=2 x tp=2, four ranks: torch's own tensor and sequence parallelism under megatron-fsdp."""
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    device, tp = _device(kind), mesh["tp"].get_group()
    reference = sequence_model(device)
    wrapped = wrap(sequence_model(device, mesh["tp"], rowwise=rowwise), mesh, [Block], sync_model_each_microbatch=False)
    squared_output(wrapped, mesh.get_local_rank("dp"), device).backward()
    wrapped.finish_grad_sync()
    for rank in range(2):
        squared_output(reference, rank, device).backward()
    errors, apart = {}, {}
    wanted = dict(reference.named_parameters())
    for name, (parameter, part) in installed_gradients(wrapped).items():
        gradient = whole(part, mesh["dp"].get_group())
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[0], Shard):
            gradient = whole(gradient, tp)  # slices of dimension 0 follow one another
        errors[name] = relative(gradient, wanted[name].grad)  # type: ignore[arg-type]
        both = whole(gradient, tp)
        apart[name] = relative(both[: gradient.numel()], both[gradient.numel() :])
    return Found(errors, apart)


def plain_slice(kind: str) -> tuple[float, float]:
    """(value, value after wrapping) of a plain slice of tp, which differs on the tp ranks; dp=2 x tp=2."""
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(4, 4, bias=False)
    before = float(mesh.get_local_rank("tp") + 1)
    nn.init.constant_(linear.weight, before)
    (part,) = sharded_parameters(wrap(nn.Sequential(linear), mesh, [nn.Linear])).values()
    return before, float(part.mean())


def skipped_block(kind: str) -> dict[str, float]:
    """Parameter -> norm of the gradient that megatron-fsdp installs where no rank used it; empty where it installs none."""
    mesh, _ = _data_mesh(kind, 1)
    wrapped = wrap(decoder(), mesh, [nn.Sequential], sync_model_each_microbatch=False)
    summed_loss(wrapped, 0, 0, dist.get_rank(), _device(kind), skip=True).backward()
    wrapped.finish_grad_sync()
    return {name: float(part.norm()) for name, (_, part) in installed_gradients(wrapped).items() if "blocks.1" in name and part.numel()}

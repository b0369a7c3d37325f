"""The private names of torch that the runtime needs, in one place, each with the reason and a guard."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mixle_core.errors import CapabilityError

TESTED = ("2.11", "2.14")
"""Oldest and newest torch minor version these names were read in."""

_COUNTED = (
    "allreduce_",
    "allreduce_coalesced_",
    "_allgather_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "broadcast_",
    "reduce_",
    "alltoall_",
    "alltoall_base_",
    "gather_",
    "scatter_",
)

_libraries: list[torch.library.Library] = []


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_num_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def _flat(values: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flat(value)
    return found


def observe_collectives(observe: Callable[[str, dist.ProcessGroup, int, Callable[[], list[torch.Tensor]]], None]) -> None:
    """Call `observe(operation, group, payload_bytes, tensors)` for every collective of this process, C++ callers included.

    Payload is the larger of what goes in and what comes out on this rank; `tensors()` gives both. torch has no public way to
    see the calls that DistributedDataParallel makes from C++; an override at the autograd dispatch key sees them all at no
    measurable cost.

    Raises:
        CapabilityError: when this torch has no such dispatch key function.
    """
    after = getattr(torch._C, "_dispatch_keyset_full_after", None)
    if after is None:
        raise CapabilityError(
            f"torch {torch.__version__} has no _dispatch_keyset_full_after, which counting needs; use torch {TESTED[0]} to {TESTED[1]}"
        )
    below_autograd = after(torch._C.DispatchKey.AutogradOther)
    library = torch.library.Library("c10d", "IMPL")
    for name in _COUNTED:
        operator = getattr(torch.ops.c10d, name, None)
        if operator is None:
            continue
        overload = operator.default
        arguments = overload._schema.arguments
        group_at = next(i for i, argument in enumerate(arguments) if argument.name == "process_group")
        tensors_at = [i for i, argument in enumerate(arguments[:group_at]) if "Tensor" in str(argument.type)]

        def counted(
            keys: Any,
            *args: Any,
            _overload: Any = overload,
            _name: str = name,
            _group_at: int = group_at,
            _tensors_at: tuple[int, ...] = tuple(tensors_at),
            **kwargs: Any,
        ) -> Any:
            payload_bytes = max(_num_bytes(args[i]) for i in _tensors_at)
            observe(_name.strip("_"), dist.ProcessGroup.unbox(args[_group_at]), payload_bytes, lambda: _flat(args[i] for i in _tensors_at))
            return _overload.redispatch(keys & below_autograd, *args, **kwargs)

        for key in ("AutogradCPU", "AutogradCUDA"):
            library.impl(name, counted, key, with_keyset=True)
    _libraries.append(library)


def local_block(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and size, in the whole tensor, of what of a DTensor lies on this rank; also where two axes cut one dim.

    Raises:
        CapabilityError: pending sums, or a torch that computes it elsewhere.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise CapabilityError(
            f"a DTensor with placements {tensor.placements}: a pending sum has no value of its own; redistribute it before"
        )
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError as error:
        raise CapabilityError(
            f"torch {torch.__version__} has no compute_local_shape_and_global_offset; use torch {TESTED[0]} to {TESTED[1]}"
        ) from error
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tuple(size)


def default_store() -> Any:
    """The `Store` that the default process group was made with; torch has no public way to ask for it."""
    return dist.distributed_c10d._get_default_store()


def in_memory_store() -> Any:
    """A `Store` for a process group of one process; torch's type stubs leave the name out."""
    return dist.HashStore()  # type: ignore[attr-defined]


def gradient_hooks(parameter: torch.Tensor) -> int:
    """Number of hooks that someone put on a parameter's gradient; torch has no public way to ask."""
    backward = getattr(parameter, "_backward_hooks", None) or ()
    post = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
    return len(backward) + len(post)

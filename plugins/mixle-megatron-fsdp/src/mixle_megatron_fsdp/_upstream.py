"""The private names of megatron-fsdp that measuring needs, with their guard, and the redirection of torch.cuda."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Self

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mixle_core import CapabilityError

SUPPORTED = "0.6"
"""The only release series that was read and measured (0.6.1)."""


def upstream(name: str = "megatron_fsdp") -> ModuleType:
    """Import megatron-fsdp, or one of its modules.

    Raises:
        CapabilityError: when it is not installed, or of a series that was not measured.
    """
    try:
        version = importlib.metadata.version("megatron-fsdp")
    except importlib.metadata.PackageNotFoundError as error:
        raise CapabilityError("megatron-fsdp is not installed; way out: pip install 'mixle-megatron-fsdp[measure]'") from error
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise CapabilityError(
            f"megatron-fsdp {version}: what mixle says of it was measured with {SUPPORTED}; way out: install megatron-fsdp "
            f"{SUPPORTED}.*, or measure anew (verify_on_gpu.py and the tests of mixle-megatron-fsdp)"
        )
    return importlib.import_module(name)


def _private(owner: Any, name: str) -> Any:
    """`owner.name`, or an error that says which private name is gone."""
    found = getattr(owner, name, None)
    if found is None:
        version = importlib.metadata.version("megatron-fsdp")
        raise CapabilityError(f"megatron-fsdp {version}: {owner} has no {name}; what mixle says of it was measured with {SUPPORTED}.1")
    return found


class _Stream:
    """Stands for a stream or an event: on a CPU every call is done when it returns."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait(self, *args: Any) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self


def redirect_cuda() -> None:
    """Let megatron-fsdp run in this process without a GPU, for measuring: these five names are all that stops it.

    It stays so until the process ends. Nothing but measurements may call it.
    """
    for owner, name, replacement in (
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "current_stream", lambda *args: _Stream()),
        (torch.cuda, "stream", lambda stream: _Stream()),
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
    ):
        setattr(owner, name, replacement)


def wrap(module: nn.Module, mesh: DeviceMesh, units: Sequence[type[nn.Module]], *, average: bool = False, **options: Any) -> Any:
    """`fully_shard_model` over the mesh dimension `dp` (and `outer`), with sums in place of means unless `average`."""
    device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return upstream().fully_shard_model(
        module,
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=list(units),
        device=device,
        calculate_per_token_loss=not average,
        **options,
    )


def policy(main_grads: torch.dtype | None, comm: torch.dtype | None) -> Any:
    """Mixed precision: dtype of the gradient buffer and of its collectives; None leaves it to megatron-fsdp."""
    return upstream().MixedPrecisionPolicy(main_grads_dtype=main_grads, grad_comm_dtype=comm)


def backward_of(wrapped: Any, *, last: bool, no_sync: bool) -> AbstractContextManager[Any]:
    """The context of one backward. With `no_sync`, the last one is marked: without a mark before it, nothing reduces."""
    if no_sync and not last:
        return _private(wrapped, "no_sync")()  # type: ignore[no-any-return]
    return _marked(wrapped) if no_sync else nullcontext()


@contextmanager
def _marked(wrapped: Any) -> Iterator[None]:
    wrapped.is_last_microbatch = True
    yield


def installed_gradients(wrapped: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name -> (parameter as the model had it, this rank's flat part of the reduced gradient), after `finish_grad_sync`."""
    raw: Mapping[str, torch.Tensor] = _private(wrapped, "raw_param")
    return {name: (raw[name], _local(parameter.grad)) for name, parameter in wrapped.module.named_parameters()}


def sharded_parameters(wrapped: Any) -> dict[str, torch.Tensor]:
    """Name -> this rank's flat part of the parameter that the optimizer steps."""
    return {name: _local(parameter) for name, parameter in wrapped.module.named_parameters()}


def _local(tensor: Any) -> torch.Tensor:
    if tensor is None:
        return torch.empty(0)
    part: torch.Tensor = tensor.detach().to_local()
    return part.flatten().cpu()


@attrs.define
class Calls:
    """The reductions of this process (one coalesced call each), and the dtypes that they send."""

    reductions: int = 0
    dtypes: set[str] = attrs.field(factory=set)


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count what megatron-fsdp reduces in this process."""
    module = upstream("megatron_fsdp.param_and_grad_buffer")
    pipeline = _private(module, "GradReducePipeline")
    reduce, prepare = _private(pipeline, "_bucket_group_gradient_reduce"), _private(module, "gradient_reduce_preprocessing")
    calls = Calls()

    @functools.wraps(reduce)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.reductions += 1
        return reduce(self, *args, **kwargs)

    @functools.wraps(prepare)
    def noted(gradient: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.dtypes.add(str(gradient.dtype))
        return prepare(gradient, *args, **kwargs)

    pipeline._bucket_group_gradient_reduce, module.gradient_reduce_preprocessing = counted, noted  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        pipeline._bucket_group_gradient_reduce, module.gradient_reduce_preprocessing = reduce, prepare  # type: ignore[attr-defined]

"""Everything of Megatron-Core that is private, or that needs a GPU, in one place, with a version guard."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import structlog
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from mixle_core import CapabilityError

TESTED = ("0.16.1", "0.16")
"""Oldest release, and the minor version, that the names in this file were read in."""

log = structlog.get_logger(__name__)

_STATE = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
"""Global of `megatron.core.parallel_state` -> field of a ProcessGroupCollection."""

_RANKS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
    "_EMBEDDING_GLOBAL_RANKS": "embd",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "pos_embd",
}


_PLACES = ("TENSOR_MODEL_PARALLEL", "PIPELINE_MODEL_PARALLEL", "DATA_PARALLEL", "EXPERT_MODEL_PARALLEL", "EXPERT_TENSOR_PARALLEL")
"""What the global state may be told a rank and a number of ranks of, in place of asking a group."""


def require_version() -> None:
    """Raise CapabilityError unless the installed Megatron-Core is one that these names were read in."""
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise CapabilityError("megatron-core is not installed; pip install 'megatron-core>=0.16.1,<0.17'") from error
    if not found.startswith(f"{TESTED[1]}."):
        way_out = f"install 'megatron-core>={TESTED[0]},<0.17'"
        raise CapabilityError(f"megatron-core {found}: this plugin was read against {TESTED[1]}; {way_out}")


class Alone:
    """Stands for the process group of one rank in a model that no process group exists for yet."""

    def size(self) -> int:
        """One."""
        return 1

    def rank(self) -> int:
        """The first."""
        return 0


@contextlib.contextmanager
def groups_in_effect(groups: Any) -> Iterator[None]:
    """Let Megatron's global state name `groups` (a ProcessGroupCollection), for the parts that take no groups as arguments."""
    from megatron.core import parallel_state

    if all(getattr(parallel_state, name, None) is getattr(groups, field, None) for name, field in _STATE.items()):
        yield  # as at every forward of the model that trains
        return
    before = set_groups(groups)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


def set_groups(groups: Any) -> dict[str, Any]:
    """As `groups_in_effect`, for good; return what was there."""
    from megatron.core import parallel_state

    places = {f"_MPU_{place}_{what}": value for place in _PLACES for what, value in (("RANK", 0), ("WORLD_SIZE", 1))}
    every = (*_STATE, *_RANKS, *places, "_GLOBAL_MEMORY_BUFFER")
    missing = [name for name in every if not hasattr(parallel_state, name)]
    if missing:
        raise CapabilityError(f"megatron.core.parallel_state has no {missing[0]}; install 'megatron-core>={TESTED[0]},<0.17'")
    before = {name: getattr(parallel_state, name) for name in every}
    for name, value in places.items():
        setattr(parallel_state, name, value if isinstance(groups.tp, Alone) else None)
    for name, field in _STATE.items():
        setattr(parallel_state, name, getattr(groups, field, None))
    for name, field in _RANKS.items():
        group = getattr(groups, field, None)
        setattr(parallel_state, name, dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else [0])
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    return before


@contextlib.contextmanager
def recorded_initialisers(config: Any) -> Iterator[None]:
    """While a model is built on meta, note on each weight the function that would fill it, as `weight.mixle_init`."""
    from megatron.core.tensor_parallel import layers

    def noting(method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensor.mixle_init = method  # type: ignore[attr-defined]
            return tensor

        return note

    def on_weight(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        names = ("output_size", "input_size", "per_partition_size", "partition_dim", "init_method", "stride")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not kwargs.get("skip_set_tensor_parallel_attributes"):
            layers.set_tensor_model_parallel_attributes(weight, True, given["partition_dim"], given.get("stride", 1))
        given["init_method"](weight)

    methods = [name for name in ("init_method", "output_layer_init_method", "embedding_init_method") if getattr(config, name, None)]
    before = {name: getattr(config, name) for name in methods}
    original = layers._initialize_affine_weight_cpu
    for name, method in before.items():
        setattr(config, name, noting(method))
    layers._initialize_affine_weight_cpu = on_weight
    try:
        yield
    finally:
        layers._initialize_affine_weight_cpu = original
        for name, method in before.items():
            setattr(config, name, method)


class _NoStream:
    """Stands for CUDA streams and events where there is no CUDA: everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _NoStream()


class _ToCpu(TorchFunctionMode):
    """Puts on the CPU what Megatron asks to have on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # Megatron compares it with torch.cuda.FloatTensor
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_redirected: list[Any] = []


def use_cpu() -> None:
    """Let Megatron-Core run on the CPU: its device arguments, streams and random states lead there. Once per process.

    Raises:
        CapabilityError: CUDA is available; then nothing is redirected.
    """
    if torch.cuda.is_available():
        raise CapabilityError("Megatron-Core runs on the CPU only where no CUDA is available; pass device='cuda', or hide the GPUs")
    if _redirected:
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu  # type: ignore[assignment,return-value]
    torch.cuda.Stream = torch.cuda.Event = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _NoStream()  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: _NoStream()  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None
    megatron_random.CudaRNGStatesTracker.fork = _fork
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16.1 reads the name without Transformer Engine too
    dist.all_to_all_single = _with_split_lists(dist.all_to_all_single)
    dist.all_gather = _of_uneven_sizes(dist.all_gather)
    dist.reduce_scatter = _into_uneven_sizes(dist.reduce_scatter)
    mode = _ToCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _redirected.append(mode)
    log.warning("megatron_on_cpu", device="cpu", redirected="CUDA device arguments, streams, events and random states; for tests")


def redirect_recomputation(layer: nn.Module) -> None:
    """Let `layer` find the redirection also when it is computed once more in a backward, which runs without function modes."""
    if not _redirected:
        return
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _ToCpu():
            return inner(*args, **kwargs)

    layer.forward = forward


def _with_split_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo takes split sizes as lists of integers only, and Megatron passes tensors."""

    def all_to_all_single(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any) -> Any:  # noqa: A002
        out, into = (None if sizes is None else [int(n) for n in sizes] for sizes in (output_split_sizes, input_split_sizes))
        return original(output, input, output_split_sizes=out, input_split_sizes=into, **kwargs)

    return all_to_all_single


def _of_uneven_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gloo gathers tensors of one size only; NCCL takes a list of different ones, which token dispatchers use."""

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        longest = max(t.shape[0] if t.dim() else 0 for t in tensor_list)
        if async_op or all(t.shape == tensor.shape for t in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = torch.cat([tensor, tensor.new_zeros(longest - tensor.shape[0], *tensor.shape[1:])])
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for target, values in zip(tensor_list, gathered, strict=True):
            target.copy_(values[: target.shape[0]])
        return None

    return all_gather


def _into_uneven_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """As for gathering: the transpose of it."""

    def reduce_scatter(output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if async_op or all(t.shape == output.shape for t in input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat(list(input_list))
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([t.shape[0] for t in input_list])[dist.get_rank(group)])
        return None

    return reduce_scatter


_states: dict[str, torch.Tensor] = {}


def seed_random_states(seeds: Mapping[str, int]) -> None:
    """Give each of Megatron's named random states (regions whose activations differ between ranks) its own seed."""
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import random as megatron_random

        tracker = megatron_random.get_cuda_rng_tracker()
        tracker.reset()
        for name, seed in seeds.items():
            tracker.add(name, seed)
        return
    for name, seed in seeds.items():
        _states[name] = torch.Generator().manual_seed(seed).get_state()


def random_states() -> dict[str, torch.Tensor]:
    """Megatron's named random states, copied."""
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import random as megatron_random

        return {name: state.clone() for name, state in megatron_random.get_cuda_rng_tracker().get_states().items()}
    return {name: state.clone() for name, state in _states.items()}


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put back what `random_states` gave."""
    if torch.cuda.is_available():
        from megatron.core.tensor_parallel import random as megatron_random

        megatron_random.get_cuda_rng_tracker().set_states(dict(states))
        return
    _states.update(states)


@contextlib.contextmanager
def _fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """As `CudaRNGStatesTracker.fork`, over the CPU's generator."""
    if name not in _states:
        yield
        return
    before = torch.random.get_rng_state()
    torch.random.set_rng_state(_states[name])
    try:
        yield
    finally:
        _states[name] = torch.random.get_rng_state()
        torch.random.set_rng_state(before)


def scale_inner_losses(scale: float) -> None:
    """Multiply the losses that routers and further-token heads add inside; the scale is Megatron's, for all models of the process."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        scaler.set_loss_scale(torch.full((1,), scale))


class NumberedModules(nn.ModuleList):
    """A ModuleList whose entries have the numbers they have in the whole model, and are reached by their position here."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, module in modules.items():
            self.add_module(str(number), module)

    def _get_abs_string_index(self, idx: int) -> str:
        return list(self._modules)[idx]

"""Functions of the backend `megatron` for Megatron Bridge, whose own loop trains: the plan becomes its configuration.

Bridge needs Transformer Engine, which needs a GPU, so what these functions set has been checked against the providers' attributes
at run time only; `verify_on_gpu.py`, beside the package's README, runs them on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

from mixle_core import CapabilityError, ParallelPlan

__all__ = ["configure_distributed_optimizer", "configure_provider", "run_pretrain"]

_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def configure_provider(provider: Any, plan: ParallelPlan) -> Any:
    """Set the sizes of `plan` on a model provider, and return it.

    Args:
        provider: a Megatron Bridge model provider, or a TransformerConfig.

    Raises:
        CapabilityError: an axis, or another choice of the plan, that the provider has no attribute for; nothing is set then.
    """
    wanted: dict[str, tuple[Any, str]] = {}
    for axis, attribute in _AXES.items():
        if plan.size(axis) > 1 or hasattr(provider, attribute):
            wanted[attribute] = (plan.size(axis), f"{axis}={plan.size(axis)}")
    if plan.sequence_parallel or hasattr(provider, "sequence_parallel"):
        wanted["sequence_parallel"] = (plan.sequence_parallel, f"sequence_parallel={plan.sequence_parallel}")
    # sums over data ranks, divided once by all tokens: a mean of the ranks' means weighs short ranks too much
    wanted["calculate_per_token_loss"] = (True, "a mean over all tokens")
    if plan.activation_checkpointing:
        why = "activation_checkpointing=True"
        wanted |= {"recompute_granularity": ("full", why), "recompute_method": ("uniform", why), "recompute_num_layers": (1, why)}
    if plan.pp > 1 and getattr(provider, "pipeline_dtype", None) is None:
        wanted["pipeline_dtype"] = (getattr(provider, "params_dtype", None), f"pp={plan.pp}")
    _set_all(provider, wanted)
    return provider


def configure_distributed_optimizer(config: Any, plan: ParallelPlan) -> Any:
    """Shard the optimizer's state over dp_shard in a Bridge configuration (`ddp` and `optimizer` in it), and return it.

    Raises:
        CapabilityError: the configuration has no such part or attribute; nothing is set then.
    """
    sharded = plan.dp_shard > 1
    why = f"dp_shard={plan.dp_shard}"
    ddp: dict[str, tuple[Any, str]] = {
        "use_distributed_optimizer": (sharded, why),
        "grad_reduce_in_fp32": (True, "gradients travel as fp32"),
        "average_in_collective": (False, "gradients are summed"),
    }
    if sharded and plan.dp_replicate > 1:
        ddp["num_distributed_optimizer_instances"] = (plan.dp_replicate, f"dp_replicate={plan.dp_replicate}")
    parts = {"ddp": ddp, "optimizer": {"use_distributed_optimizer": (sharded, why)}}
    for part, wanted in parts.items():
        _require_all(getattr(config, part, None), wanted, f"{type(config).__name__}.{part}")
    for part, wanted in parts.items():
        _set_all(getattr(config, part), wanted)
    return config


def run_pretrain(config: Any, forward_step: Any, *, plan: ParallelPlan) -> Any:
    """Train with Megatron Bridge's own loop under `plan`; its collectives and its steps are its own.

    Args:
        config: a Bridge ConfigContainer; its `model`, `ddp` and `optimizer` are set from `plan`.
        forward_step: as Bridge's `pretrain` takes it.

    Raises:
        CapabilityError: no Megatron Bridge here; an attribute it lacks; batch sizes that are not those of the plan.
    """
    try:
        from megatron.bridge.training.pretrain import pretrain
    except ImportError as error:
        raise CapabilityError(
            f"run_pretrain needs Megatron Bridge, which cannot be imported here ({error}); install 'megatron-bridge' and "
            "'transformer-engine' on a machine with a GPU, or train a MegatronModel with prepare"
        ) from error
    if plan.precision == "bf16":
        _require_all(config, {"mixed_precision": ("bf16_mixed", "precision=bf16")}, type(config).__name__)
    _require_batches(getattr(config, "train", None), plan)
    configure_distributed_optimizer(config, plan)
    configure_provider(config.model, plan)
    if plan.precision == "bf16":
        config.mixed_precision = "bf16_mixed"
    if hasattr(getattr(config, "dist", None), "distributed_timeout_minutes"):
        config.dist.distributed_timeout_minutes = math.ceil(plan.timeout_s / 60)
    return pretrain(config, forward_step)


def _require_batches(train: Any, plan: ParallelPlan) -> None:
    _require_all(train, {"micro_batch_size": (None, "rows of a microbatch"), "global_batch_size": (None, "rows of an update")}, "train")
    ranks = plan.data_size // plan.cp
    rows = ranks * plan.num_backwards * train.micro_batch_size
    if train.global_batch_size != rows:
        raise CapabilityError(
            f"train.global_batch_size={train.global_batch_size}: the plan has {ranks} data ranks with {plan.num_backwards} backwards of "
            f"micro_batch_size={train.micro_batch_size} in an update; expected {rows}"
        )


def _require_all(target: Any, wanted: dict[str, tuple[Any, str]], name: str) -> None:
    missing = [(attribute, why) for attribute, (_, why) in wanted.items() if not hasattr(target, attribute)]
    if missing:
        found = "is missing" if target is None else f"has no attribute {missing[0][0]!r}"
        raise CapabilityError(
            f"{name} {found}, which {missing[0][1]} needs; nothing was set; way out: change the plan, or use a provider that has it"
        )


def _set_all(target: Any, wanted: dict[str, tuple[Any, str]]) -> None:
    _require_all(target, wanted, type(target).__name__)
    for attribute, (value, _) in wanted.items():
        setattr(target, attribute, value)

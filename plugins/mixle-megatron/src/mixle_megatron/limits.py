"""What this plugin declines to own, each with what was measured or what is missing: one place for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mixle_core import Layouts, ParallelPlan, Refusal


def refusals(config: Any, plan: ParallelPlan, layouts: Layouts) -> Iterator[Refusal]:
    """Why a model with `config` is not owned under `plan`; none where it equals one process.

    Args:
        config: the model's TransformerConfig, before the plan's sizes are set on it.
    """
    yield from _precision(config, plan, layouts)
    yield from _recomputation(config, plan)
    if plan.dp_replicate > 1 and plan.dp_shard > 1:
        yield Refusal(
            "dp_replicate and dp_shard above 1 are several instances of Megatron's distributed optimizer, unverified without CUDA",
            "put all data ranks on dp_shard (sharded optimizer state) or on dp_replicate",
        )
    if config.num_moe_experts:
        yield from _routing(config, plan)


def _precision(config: Any, plan: ParallelPlan, layouts: Layouts) -> Iterator[Refusal]:
    if plan.precision != "fp32":
        yield Refusal(
            f"precision={plan.precision}: Megatron's linear layers keep fp32 weights and bf16 activations apart only under CUDA autocast, "
            "so this is unverified",
            "use precision='fp32'",
        )
    half = [flag for flag in ("bf16", "fp16") if getattr(config, flag, False)]
    other = [f"{layout.name} is {layout.dtype}" for layout in layouts.parameters.values() if layout.dtype != "torch.float32"]
    if half or other:
        found = f"config.{half[0]}=True" if half else other[0]
        yield Refusal(
            f"{found}: parameters in half precision have no fp32 copy that mixle's session steps, and were up to 0.02 off one process",
            "set params_dtype=torch.float32, bf16=False and fp16=False",
        )


def _recomputation(config: Any, plan: ParallelPlan) -> Iterator[Refusal]:
    dropout = max(config.hidden_dropout, config.attention_dropout)
    if plan.activation_checkpointing and dropout:
        yield Refusal(
            f"activation_checkpointing=True with dropout {dropout}: recomputation would draw other masks from Megatron's random states",
            "set hidden_dropout and attention_dropout to 0, or leave recomputation out",
        )
    if config.recompute_granularity:
        yield Refusal(
            f"recompute_granularity={config.recompute_granularity!r}: Megatron's own recomputation needs CUDA's random states: unverified",
            "set it to None and ParallelPlan(activation_checkpointing=True)",
        )


def _routing(config: Any, plan: ParallelPlan) -> Iterator[Refusal]:
    """What routers add to the loss, or decide, by the tokens that one rank sees."""
    if getattr(config, "moe_router_enable_expert_bias", False) and plan.world_size > 1:
        yield Refusal(
            "moe_router_enable_expert_bias=True moves the router by token counts outside of any gradient, never compared with one process",
            "set it to False",
        )
    kinds = config.moe_router_load_balancing_type
    kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if "global_aux_loss" in kinds and plan.world_size > 1:
        yield Refusal(
            "global_aux_loss weighs tokens of all data ranks and microbatches so far: with dp_replicate=2 its gradients were 1.0 off",
            "use aux_loss or seq_aux_loss",
        )
    if plan.tp == 1:
        return
    inner = [kind for kind in kinds if kind in ("aux_loss", "seq_aux_loss")] if config.moe_aux_loss_coeff else []
    if config.moe_z_loss_coeff:
        inner.append("moe_z_loss_coeff")
    if inner:
        yield Refusal(
            f"{inner[0]} with tp={plan.tp}: Megatron 0.16 divides it by tp twice where losses are summed over tokens, so router gradients "
            "were 0.5 off with tp=2",
            "set tp=1, or leave that loss out",
        )
    if config.moe_expert_capacity_factor is not None or "sinkhorn" in kinds:
        what = "sinkhorn" if "sinkhorn" in kinds else "moe_expert_capacity_factor"
        yield Refusal(
            f"{what} with tp={plan.tp} decides by the tokens of one rank, which are those of a part of the sequence: dropping was 0.8 off",
            "set tp=1, or leave it out",
        )

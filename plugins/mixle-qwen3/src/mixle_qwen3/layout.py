"""Qwen3 on tp: heads and hidden units are cut; q/k norms see this rank's heads; with sequence parallelism all norms see its tokens."""

from __future__ import annotations

from typing import Any

from mixle_core import Boundary, CapabilityError, ModelLayout, ModuleLayout, ParallelPlan, Replica, Role, Shard, Term

WHOLE = Replica("complete")
SHARED = Replica("partial")
SEQUENCE = Shard(1)
"""Activations of shape [batch, sequence, hidden], cut along the sequence between blocks."""


def qwen3_layout(model: Any, config: Any, plan: ParallelPlan) -> ModelLayout:
    """Declare every parameter of `model` on the tp axis.

    Raises:
        CapabilityError: when tp does not divide the heads or the vocabulary, by name.
    """
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, field) % plan.tp:
            raise CapabilityError(
                f"qwen3: {field}={getattr(config, field)} is not divisible by tp={plan.tp}; choose tp so that it divides "
                f"num_attention_heads={config.num_attention_heads} and num_key_value_heads={config.num_key_value_heads}"
            )
    headed = hasattr(model, "lm_head")
    base = "model." if hasattr(model, "model") else ""
    between = SEQUENCE if plan.sequence_parallel else WHOLE
    norm = SHARED if plan.sequence_parallel else WHOLE
    entering = Boundary(outside=between, inside=SHARED)
    leaving = Boundary(outside=between, inside=Term())
    query = Shard(0, unit=config.head_dim, unit_name="query head")
    key_value = Shard(0, unit=config.head_dim, unit_name="key/value head")
    attention: dict[str, Role] = {
        "q_proj.weight": query,
        "{k,v}_proj.weight": key_value,
        "{q,k}_norm.weight": SHARED,
    }
    output: dict[str, Role] = {"weight": Shard(1, unit=config.head_dim, unit_name="query head")}
    if config.attention_bias:
        attention |= {"q_proj.bias": query, "{k,v}_proj.bias": key_value}
        output |= {"bias": SHARED}
    layer = f"{base}layers.*"
    modules = {
        f"{base}embed_tokens": ModuleLayout(
            parameters={"weight": Shard(0)}, lookup="weight", output=Boundary(outside=WHOLE, inside=Term())
        ),
        f"{layer}": ModuleLayout(parameters={"{input,post_attention}_layernorm.weight": norm}),
        f"{layer}.self_attn": ModuleLayout(
            parameters=attention, inputs={"hidden_states": entering}, sharded_dropout=config.attention_dropout > 0
        ),
        f"{layer}.self_attn.o_proj": ModuleLayout(parameters=output, output=leaving, once=("bias",) if config.attention_bias else ()),
        f"{layer}.mlp": ModuleLayout(parameters={"{gate,up}_proj.weight": Shard(0)}, inputs={0: entering}),
        f"{layer}.mlp.down_proj": ModuleLayout(parameters={"weight": Shard(1)}, output=leaving),
    }
    last_norm = ModuleLayout(parameters={"weight": norm})
    if headed:
        modules["lm_head"] = ModuleLayout(
            parameters={"weight": Shard(0)}, inputs={0: entering}, output=Boundary(outside=WHOLE, inside=Shard(-1))
        )
    elif plan.sequence_parallel:
        last_norm = ModuleLayout(parameters={"weight": norm}, output=Boundary(outside=WHOLE, inside=SEQUENCE))
    modules[f"{base}norm"] = last_norm
    if plan.sequence_parallel:
        # the model derives rotary angles and mask from the embedding's length, so the cut comes after it
        modules[f"{base}layers.0"] = ModuleLayout(inputs={0: Boundary(outside=WHOLE, inside=SEQUENCE)})
    return ModelLayout(axis="tp", modules=modules, units=(f"{base}layers.*",))

"""Megatron GPT models by name: `megatron-gpt:tiny` and its relatives."""

from __future__ import annotations

from typing import Any

from mixle_core import Layouts, UsageError, hookimpl

_BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 64,
    "qk_layernorm": True,
    "layernorm_epsilon": 1e-6,
}
_MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}

SIZES: dict[str, dict[str, Any]] = {
    "tiny": _BASE,
    "tiny-tied": {**_BASE, "tied": True},
    "tiny-moe": {**_BASE, **_MOE},
    "demo": {
        **_BASE,
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 16,
        "ffn_hidden_size": 320,
        "vocab_size": 257,
    },
    "demo-moe": {**_BASE, **_MOE, "hidden_size": 96, "ffn_hidden_size": 192, "kv_channels": 24, "moe_ffn_hidden_size": 96},
}
"""Name -> fields of TransformerConfig, and `vocab_size`, `max_length`, `tied`."""


@hookimpl
def build_model(spec: str) -> Any:
    """Build a GPT of Megatron-Core with q/k norms, dense or with experts, on meta."""
    if spec not in SIZES:
        raise UsageError(f"megatron-gpt:{spec}: expected one of {', '.join(SIZES)}")
    return gpt(**SIZES[spec])


def gpt(*, vocab_size: int = 260, max_length: int = 4096, tied: bool = False, block_spec: Any = None, **fields: Any) -> Any:
    """A MegatronModel around GPTModel with local layers: RMS norms, gated MLP, rotary positions.

    Args:
        tied: embedding and head share one weight.
        block_spec: `(config, stage) -> spec` of the decoder; None for `local_block_spec`.
        **fields: of TransformerConfig.
    """
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mixle_megatron.model import MegatronModel
    from mixle_megatron.spec import local_block_spec

    moe = {} if not fields.get("num_moe_experts") else {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    config = TransformerConfig(
        **{
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": torch.float32,
            "use_cpu_initialization": True,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "gradient_accumulation_fusion": False,
            **moe,
            **fields,
        }
    )

    def provider(config: Any, *, pre_process: bool, post_process: bool, pg_collection: Any) -> Any:
        return GPTModel(
            config=config,
            transformer_layer_spec=(block_spec or local_block_spec)(config, pg_collection.pp.rank()),
            vocab_size=vocab_size,
            max_sequence_length=max_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            pg_collection=pg_collection,
        )

    return MegatronModel(config, provider)


@hookimpl
def init_params(model: Any, layouts: Layouts, seed: int) -> frozenset[str] | None:
    """Fill a module of a MegatronModel as its constructor would have, from the seed and its name."""
    from mixle_megatron.init import fill

    return fill(model, layouts) if hasattr(model, "mixle_inits") else None

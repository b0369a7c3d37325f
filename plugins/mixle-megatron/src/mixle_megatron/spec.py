"""Layer specs without Transformer Engine, with a norm that says when its gradient is a term of a sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.Module):
    """RMS norm that marks its weight under sequence parallelism, as Transformer Engine's does; torch's is refused there.

    Args:
        config: a TransformerConfig.
        hidden_size: of the last dimension.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        return nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


def local_block_spec(config: Any, stage: int = 0) -> Any:
    """The spec of one stage's decoder: Megatron's local layers, dense or with experts, with RMSNorm from here."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = RMSNorm
        parts.self_attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=None, pp_rank=stage), layer_norm=RMSNorm
    )

"""The models and the loss that these tests train."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from mixle_megatron.gpt import SIZES, gpt
from torch import nn

import mixle_core as mx
from mixle_core.audit import VerifyReport, verify

VOCAB, ROWS, LENGTH = 64, 2, 8


@functools.cache
def plugins() -> Any:
    """As a user's command line finds them, once in each process."""
    return mx.load_plugins(required=["megatron", "megatron-gpt"])


def model(size: str, **fields: Any) -> Callable[[], nn.Module]:
    """A builder of one of the named sizes, with some fields changed."""
    return lambda: gpt(**{**SIZES[size], "vocab_size": VOCAB, **fields})


def next_token_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed loss of the next tokens; tokens below 0 have none."""
    logits = module(ids.clamp_min(0))[:, :-1]
    targets = ids[:, 1:].clone()
    targets[targets < 0] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100), int((targets >= 0).sum())


def parallel_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same by Megatron's own loss over logits that stay cut over tp."""
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = -1
    losses = module(ids.clamp_min(0), labels=targets.clamp_min(0))
    mask = targets >= 0
    return (losses * mask).sum(), int(mask.sum())


def batch(update: int, backward: int, data_rank: int) -> torch.Tensor:
    """Random ids; data ranks have different numbers of tokens with a loss."""
    generator = torch.Generator().manual_seed(1 + 7919 * update + 104729 * backward + 15485863 * data_rank)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    ids[0, LENGTH - 1 - data_rank :] = -1
    return ids


def verified(size: str, plan: mx.ParallelPlan, fields: dict[str, Any], loss: str, options: dict[str, Any]) -> VerifyReport:
    """One plan against one process, on this rank."""
    build = model(size, **fields)
    return verify(build, plan, loss=globals()[loss], batch=batch, backend="megatron", plugins=plugins(), **options)


def named_norms(**fields: Any) -> nn.Module:
    """A GPT whose attention has, beside Megatron's q_layernorm and k_layernorm, norms of its own heads named q_norm and out_norm.

    And one number for each head, a slice on each rank, marked as Megatron marks per-head parameters.
    """
    from megatron.core.transformer.attention import SelfAttention
    from mixle_megatron.spec import RMSNorm, local_block_spec

    class OtherNames(SelfAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.q_norm = RMSNorm(self.config, self.hidden_size_per_attention_head)
            self.out_norm = RMSNorm(self.config, self.hidden_size_per_attention_head)
            self.head_scale = nn.Parameter(torch.empty(self.num_attention_heads_per_partition))
            self.head_scale.tensor_model_parallel, self.head_scale.partition_dim = True, 0  # type: ignore[attr-defined]
            self.config.init_method(self.head_scale)
            self.linear_proj.register_forward_pre_hook(self.norm_heads)

        def norm_heads(self, module: nn.Module, args: Any) -> Any:
            heads = self.out_norm(args[0].unflatten(-1, (-1, self.hidden_size_per_attention_head)))
            return ((heads * (1 + self.head_scale)[:, None]).flatten(-2), *args[1:])

        def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
            query, *others = super().get_query_key_value_tensors(*args, **kwargs)
            return (self.q_norm(query), *others)

    def spec(config: Any, stage: int = 0) -> Any:
        block = local_block_spec(config, stage)
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = OtherNames
        return block

    return model("tiny", block_spec=spec, **fields)()


def norm_with_a_known_name(**fields: Any) -> nn.Module:
    """A GPT whose norm before the attention, complete on tp, is named as Megatron's norms of split heads are."""
    from mixle_megatron.spec import RMSNorm, local_block_spec

    class Inner(nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
            super().__init__()
            self.q_layernorm = RMSNorm(config, hidden_size, eps)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.q_layernorm(hidden)

    def spec(config: Any, stage: int = 0) -> Any:
        block = local_block_spec(config, stage)
        for layer in block.layer_specs:
            layer.submodules.input_layernorm = Inner
        return block

    return model("tiny", block_spec=spec, **fields)()


def multi_token(*, told: bool = True, **fields: Any) -> nn.Module:
    """A GPT that predicts one more token, with Megatron's own block for it.

    Args:
        told: whether the provider puts its groups into Megatron's global state: the block asks that, and takes no groups.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from mixle_megatron._upstream import groups_in_effect
    from mixle_megatron.model import MegatronModel
    from mixle_megatron.spec import local_block_spec

    config = model("tiny", **fields)().base_config
    config.mtp_num_layers = 1

    def provider(config: Any, *, pre_process: bool, post_process: bool, pg_collection: Any) -> nn.Module:
        stage = pg_collection.pp.rank()
        block = local_block_spec(config, stage)
        with groups_in_effect(pg_collection) if told else contextlib.nullcontext():
            if told:
                parallel_state.set_pipeline_model_parallel_rank(stage)
                parallel_state.set_pipeline_model_parallel_world_size(pg_collection.pp.size())
            return GPTModel(
                config=config,
                transformer_layer_spec=block,
                vocab_size=VOCAB,
                max_sequence_length=64,
                pre_process=pre_process,
                post_process=post_process,
                position_embedding_type="rope",
                pg_collection=pg_collection,
                mtp_block_spec=get_gpt_mtp_block_spec(config, block.layer_specs[0], use_transformer_engine=False, pp_rank=stage),
            )

    return MegatronModel(config, provider)


def multi_token_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """As `parallel_loss`; the loss of the token after the next comes from inside, over the same mask."""
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = -1
    mask = (targets >= 0).float()
    losses = module(ids.clamp_min(0), labels=targets.clamp_min(0), loss_mask=mask)
    return (losses * mask).sum(), int(mask.sum())


def gradients(build: Any, plan: mx.ParallelPlan, rows: Any, loss: Any = next_token_loss, **run: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> (gradient under `plan`, gradient of one process), both over all tokens of one update; on every rank.

    Args:
        rows: `(backward, data rank) -> microbatch`.
    """
    from mixle_core.audit.verification import gathered, reference_model, reference_window
    from mixle_core.runtime import attach, logical_parameters

    reduction = attach(build(), plan, backend="megatron", seed=0, plugins=plugins())
    at, number = reduction.mesh.coordinates, plan.num_backwards
    data_rank = at["dp_replicate"] * plan.dp_shard + at["dp_shard"]
    loss_sum, tokens = reduction.run([rows(i, data_rank) for i in range(number)], loss, **run)
    reduced = reduction.finish(tokens, float(loss_sum), **run)
    ours = gathered(reduction, reduced.gradients)
    reference = reference_model(build, 0, reduction)
    theirs = logical_parameters(reference)
    count, _ = reference_window(reference, theirs, loss, [[rows(i, r) for r in range(plan.data_size)] for i in range(number)])
    assert count == reduced.num_tokens
    reduction.close()
    return {name: (gradient, theirs[name].grad) for name, (gradient, _) in ours.items()}

"""Tensor parallelism as one writes it by hand for transformers' Qwen3: sliced weights and explicit all-reduces, as in Megatron."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3ForCausalLM


class _CopyIn(torch.autograd.Function):
    """Nothing forward, a sum over tp backward; in place, since the gradient that arrives is a fresh sum of products."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumOut(torch.autograd.Function):
    """A sum over tp forward, in place on a fresh product; nothing backward."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.mark_dirty(values)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _GatherOut(torch.autograd.Function):
    """All slices of the last dim forward; this rank's slice backward, since all ranks compute the same loss."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        values = values.contiguous()
        pieces = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, values, group=group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)].contiguous(), None


class _VocabularySlice(nn.Module):
    """The rows of an embedding that this rank holds; others give zeros, and the sum over tp puts them together."""

    def __init__(self, weight: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(_slice(weight, 0, group))
        self._group = group
        self._first = dist.get_rank(group) * self.weight.shape[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self._first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        rows = nn.functional.embedding(local.masked_fill(foreign, 0), self.weight)
        return _SumOut.apply(rows.masked_fill(foreign.unsqueeze(-1), 0.0), self._group)


def _slice(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return tensor.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)


def cut(model: Qwen3ForCausalLM, group: dist.ProcessGroup) -> dict[str, int]:
    """Cut `model` over the group in place; returns name -> dim of what is a slice now.

    Everything else is a copy. Gradients of q/k norms are terms of a sum, those of the other norms are complete.
    """
    dims: dict[str, int] = {"model.embed_tokens.weight": 0, "lm_head.weight": 0}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    model.model.embed_tokens = _VocabularySlice(model.model.embed_tokens.weight, group)
    for number, layer in enumerate(model.model.layers):
        for dim, names in ((0, columns), (1, rows)):
            for name in names:
                linear = layer.get_submodule(name)
                linear.weight = nn.Parameter(_slice(linear.weight, dim, group))
                dims[f"model.layers.{number}.{name}.weight"] = dim
        # one sum serves q, k and v, and one gate and up
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda module, args, output: _CopyIn.apply(output, group))
        for name in rows:
            layer.get_submodule(name).register_forward_hook(lambda module, args, output: _SumOut.apply(output, group))
    model.lm_head.weight = nn.Parameter(_slice(model.lm_head.weight, 0, group))
    model.lm_head.register_forward_pre_hook(lambda module, args: (_CopyIn.apply(args[0], group),))
    model.lm_head.register_forward_hook(lambda module, args, output: _GatherOut.apply(output, group))
    return dims


def is_partial(name: str) -> bool:
    """Whether a copy's gradient is one term of a sum over tp: the norms that see this rank's heads only."""
    return name.endswith(("q_norm.weight", "k_norm.weight"))

"""Models that a framework or a hand splits over the ranks, and the same weights in one process: what a layout is measured on."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

VOCAB, HIDDEN, INNER = 32, 8, 16


class Copy(torch.autograd.Function):
    """A sum of the ranks' terms in the backward."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return _summed(gradient)


class Sum(torch.autograd.Function):
    """A sum of the ranks' terms in the forward."""

    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Block(nn.Module):
    """Norm, fused gate and up, down with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        nn.init.zeros_(self.gate_up.bias)  # slices of zeros are alike wherever they are from
        nn.init.zeros_(self.down.bias)

    def forward(self, hidden):
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def reference() -> nn.Module:
    """The same weights at every call."""
    return Model()


def _fused(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([half.chunk(dist.get_world_size())[dist.get_rank()] for half in values.chunk(2)])


class _Down(nn.Module):
    """The bias is added behind the sum."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.data.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())
        self.bias = nn.Parameter(whole.bias.data.clone())

    def forward(self, values):
        return Sum.apply(F.linear(values, self.weight)) + self.bias


def _split(block: Block) -> None:
    with torch.no_grad():
        for name in ("weight", "bias"):
            setattr(block.gate_up, name, nn.Parameter(_fused(getattr(block.gate_up, name).data)))
    block.down = _Down(block.down)


def by_hand() -> nn.Module:
    """Fused matrices cut part by part; a hook sums gradients ahead of the norms, so that theirs are terms."""
    model = Model()
    for block in model.blocks:
        _split(block)
        block.norm.register_forward_pre_hook(lambda module, args: (Copy.apply(args[0]),))
    return model


class _Ahead(nn.Module):
    """The gradient is summed ahead of the norm, in code of the block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm, self.gate_up, self.down = block.norm, block.gate_up, block.down

    def forward(self, hidden):
        gate, up = self.gate_up(self.norm(Copy.apply(hidden))).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


def norm_inside() -> nn.Module:
    """Norms compute on the share: their gradients are terms."""
    model = Model()
    for index, block in enumerate(model.blocks):
        _split(block)
        model.blocks[index] = _Ahead(block)
    return model


def other_values() -> nn.Module:
    """One weight of one rank is no slice."""
    model = by_hand()
    if dist.get_rank() == 1:
        model.blocks[1].gate_up.weight.data[3] += 1.0
    return model


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, factor):
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient, None


def _with_gradient_times(factor: float) -> nn.Module:
    """The last norm's weight has its gradient times a factor on this rank."""
    model = Model()
    norm = model.norm
    norm.forward = lambda hidden: F.layer_norm(hidden, (HIDDEN,), _Scaled.apply(norm.weight, factor), norm.bias, norm.eps)
    return model


def odd_gradient() -> nn.Module:
    """The second rank's gradient is three times the others'."""
    return _with_gradient_times(3.0 if dist.get_rank() else 1.0)


def pairs_only() -> nn.Module:
    """Terms of 1/4 and 3/4: they add up over pairs of neighbours, not over all ranks."""
    return _with_gradient_times(0.75 if dist.get_rank() % 2 else 0.25)


def odd_function() -> nn.Module:
    """Twice what the reference returns."""
    model = by_hand()
    model.head.register_forward_hook(lambda module, args, output: 2 * output)
    return model


def renamed() -> nn.Module:
    """The last norm has another name than in the reference."""
    model = Model()
    model.last_norm = model.norm
    del model.norm
    return model


def random_slice() -> nn.Module:
    """The last norm lacks an element."""
    model = Model()
    model.norm.weight = nn.Parameter(model.norm.weight.data[:7].clone())
    return model


def reduced_by_a_hook() -> nn.Module:
    """A hook on a parameter sums its gradient; what is measured is what it was before."""
    model = norm_inside()
    for block in model.blocks:
        for parameter in block.norm.parameters():
            parameter.register_hook(_summed)
    return model


def _summed(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


class Heads(nn.Module):
    """Queries and keys; two key heads of four elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(HIDDEN, 16, bias=False), nn.Linear(HIDDEN, 8, bias=False)

    def forward(self, rows):
        return (self.query(rows).unflatten(-1, (-1, 4)) * self.key(rows).unflatten(-1, (-1, 4)).repeat_interleave(2, -2)).flatten(-2)


def repeated_keys() -> nn.Module:
    """Four ranks with a query head each; two of them share a key head."""
    model = Heads()
    model.query.weight = nn.Parameter(model.query.weight.data.chunk(4)[dist.get_rank()].clone())
    model.key.weight = nn.Parameter(model.key.weight.data.chunk(2)[dist.get_rank() // 2].clone())
    return model


class Extra(nn.Module):
    """A shift that one rank computes for all."""

    def __init__(self, holds: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.Linear(HIDDEN, HIDDEN)
        self.extra = nn.Linear(HIDDEN, HIDDEN)
        self.shared = True
        if not holds:
            self.extra = None

    def forward(self, rows):
        shift = self.extra(rows) if self.extra is not None else torch.zeros_like(rows)
        return self.main(rows) + (Sum.apply(shift) if dist.is_initialized() and not self.shared else shift)


def on_one_rank() -> nn.Module:
    """Only the first rank holds the extra layer."""
    model = Extra(dist.get_rank() == 0)
    model.shared = False
    return model


class OneKey(nn.Module):
    """Four heads and one key for all of them, which every rank computes from its share of the gradient; one head for all tokens."""

    def __init__(self, parts: int = 1, rank: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.query, self.key, self.out = nn.Linear(HIDDEN, 16), nn.Linear(HIDDEN, 4), nn.Linear(16, HIDDEN, bias=False)
        self.drop = nn.Dropout(dropout)
        self.query.weight, self.query.bias = _shares(self.query.weight, self.query.bias, parts=parts, rank=rank)
        (self.out.weight,) = _shares(self.out.weight, parts=parts, rank=rank, dim=1)
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.head.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.parts = parts

    def forward(self, ids):
        hidden = self.embed(ids)
        entered = Copy.apply(hidden) if self.parts > 1 else hidden
        queries = self.query(entered).unflatten(-1, (-1, 4))
        inner = self.drop((queries * self.key(entered).tanh().unsqueeze(-2)).flatten(-2))
        out = self.out(inner)
        return self.head(hidden + (Sum.apply(out) if self.parts > 1 else out))


def _shares(*values: torch.Tensor, parts: int, rank: int, dim: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(value.detach().chunk(parts, dim)[rank].clone()) for value in values]


def one_key() -> nn.Module:
    """Split over the ranks."""
    return OneKey(dist.get_world_size(), dist.get_rank())


def dropping() -> nn.Module:
    """The same with dropout on slices, which a measurement leaves out."""
    return OneKey(dist.get_world_size(), dist.get_rank(), dropout=0.5)


class PlanBlock(nn.Module):
    """Two linear layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, hidden):
        return hidden + self.down(self.up(self.norm(hidden)).relu())


def plain() -> nn.Module:
    """What the plans below are for."""
    model = Model()
    torch.manual_seed(1)
    model.blocks = nn.ModuleList(PlanBlock() for _ in range(2))
    return model


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
ALONG_THE_SEQUENCE = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(use_local_output=True),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(use_local_output=True),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
TURNED = {**ALONG_THE_SEQUENCE, "head": RowwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
MISSPELT = {"blocks.*.upp": ColwiseParallel()}


def planned(plan: str) -> nn.Module:
    """Under one of the plans above."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(plain(), init_device_mesh("cpu", (dist.get_world_size(),)), globals()[plan])


def moe() -> nn.Module:
    """A small mixture of experts of transformers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=2, num_hidden_layers=2, max_position_embeddings=64)
    return Qwen3MoeForCausalLM(config).float()


def tied() -> nn.Module:
    """A dense model of transformers with one weight for embedding and head, and biases in its attention."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attention_bias=True, tie_word_embeddings=True)).float()


def by_transformers(build) -> nn.Module:
    """Read by transformers with its tensor-parallel plan."""
    from transformers.distributed import DistributedConfig

    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, src=0)
    model = build()
    if dist.get_rank() == 0:
        model.save_pretrained(place[0])
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size())
    return type(model).from_pretrained(place[0], distributed_config=config, dtype=torch.float32)

"""Parallel models with a planted fault each, and the same weights in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

HIDDEN, INNER, VOCAB = 8, 16, 32


class Copy(torch.autograd.Function):
    """The input of a split computation: a sum of the terms in the backward."""

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """The output of a split computation: a sum of the terms."""

    @staticmethod
    def forward(ctx, values):
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    """Embedding, a norm on the inner activations of an MLP, a head; `parts` ranks hold a part of the MLP each."""

    def __init__(self, parts: int = 1, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        up, down = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(INNER, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, INNER // parts, bias=False), nn.Linear(INNER // parts, HIDDEN, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(parts)[rank])
            self.down.weight.copy_(down.weight.chunk(parts, 1)[rank])
        self.scale = nn.Parameter(torch.ones(4) + 0.1 * torch.arange(4.0))  # works on groups of four inner activations
        self.parts = parts

    def forward(self, ids):
        hidden = self.embed(ids)
        inner = self.up(Copy.apply(hidden) if self.parts > 1 else hidden)
        inner = (inner.unflatten(-1, (-1, 4)) * self.scale).flatten(-2).relu()
        out = self.down(inner)
        return self.head(hidden + (Sum.apply(out) if self.parts > 1 else out))


def reference() -> nn.Module:
    return Net()


def _hooked(change) -> nn.Module:
    model = Net(dist.get_world_size(), dist.get_rank())
    model.scale.register_hook(change)
    return model


def _summed(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


def clean() -> nn.Module:
    """The sum over the ranks of what each of them computed of the scale, once for each microbatch's own term."""
    return _hooked(_summed)


def missing_sum() -> nn.Module:
    return _hooked(lambda gradient: gradient)


def reduced_twice() -> nn.Module:
    return _hooked(lambda gradient: _summed(_summed(gradient)))


def averaged() -> nn.Module:
    return _hooked(lambda gradient: _summed(gradient) / dist.get_world_size())


def scaled() -> nn.Module:
    return _hooked(lambda gradient: 3.0 * _summed(gradient))


def drifting() -> nn.Module:
    return _hooked(lambda gradient: _summed(gradient) * torch.tensor([1.0, 1.0, 1.0, 1.0 + dist.get_rank()]))


def never_trained() -> nn.Module:
    model = Net(dist.get_world_size(), dist.get_rank())
    model.register_forward_pre_hook(lambda module, args: setattr(module.scale, "grad", None))
    model.scale.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    return model


def reduced_again() -> nn.Module:
    """As a hook on the accumulated gradient does: what was summed before is summed once more."""
    model = Net(dist.get_world_size(), dist.get_rank())
    model.scale.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
    return model


def nonsense() -> nn.Module:
    return _hooked(lambda gradient: torch.tensor([1.0, -2.0, 3.0, -4.0]))


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net())


def fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = Net()
    fully_shard(model)
    return model


def not_a_model() -> int:
    return 3

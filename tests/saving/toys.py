"""A small model with everything that tells states apart, its plans, and what a run of it shows."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.audit.verification import gathered
from mixle_core.testing import ToyLayout, ToyLM, next_token_loss, token_batch

Plan = mx.ParallelPlan

PLANS = {
    "one": Plan(),
    "ddp2": Plan(dp_replicate=2),
    "fsdp2": Plan(dp_shard=2),
    "hsdp": Plan(dp_replicate=2, dp_shard=2),
    "tp2": Plan(tp=2),
    "ddp2 x tp2": Plan(dp_replicate=2, tp=2),
    "fsdp2 x tp2": Plan(dp_shard=2, tp=2),
}


class Dropped(ToyLM):
    """With dropout between the blocks, and a persistent buffer that counts rows."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(blocks)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ramp", torch.arange(4.0), persistent=False)

    def forward(self, ids, use_branch=True):
        self.seen += 1
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = self.dropout(block(hidden, use_branch))
        return self.head(self.norm(hidden))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Dropped()


def make(plan, **options) -> mx.Session:
    return mx.prepare(
        options.pop("build", build)(),
        plan,
        loss=next_token_loss,
        optimizer=options.pop("optimizer", partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)),
        schedule=options.pop("schedule", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50)),
        max_grad_norm=1.0,
        plugins={"toy": ToyLayout()} if plan.tp > 1 else None,
        seed=3,
        **options,
    )


def rows(plan, update: int) -> torch.Tensor:
    """Of this rank's data rank: the same eight rows for every plan."""
    at = plan.coordinates(dist.get_rank() if dist.is_initialized() else 0)
    everything = torch.cat([token_batch(update, 0, n) for n in range(4)])
    return everything.chunk(plan.data_size)[at["dp_replicate"] * plan.dp_shard + at["dp_shard"]]


def whole_state(session) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state by name and kind, whole; copies must be equal to the bit."""
    reduction = session.reduction
    parts = {"parameter": {}}
    for optimizer in session.optimizers.values():
        by_id = {id(p): name for name, p in reduction.named_parameters()}
        for parameter, state in optimizer.state.items():
            for kind, value in state.items():
                parts.setdefault(kind, {})[by_id[id(parameter)]] = value
    parts["parameter"] = {name: p.detach() for name, p in reduction.named_parameters() if p.requires_grad}
    found = {}
    for kind, tensors in parts.items():
        if all(not value.dim() for value in tensors.values()):  # numbers, such as step
            found |= {f"{kind}:{name}": value.clone() for name, value in tensors.items()}
            continue
        for name, (whole, equal) in gathered(reduction, tensors).items():
            assert equal, (kind, name)
            if whole is not None:
                found[f"{kind}:{name}"] = whole
    return found


def drawn() -> tuple[float, float, float]:
    """One number of each generator that a training may use beside the model."""
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002 - the global one is meant


DDP2 = Plan(dp_replicate=2)
FSDP2 = Plan(dp_shard=2)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def attempt(call) -> str:
    try:
        call()
    except mx.MixleError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def trained(plan, updates: int = 1, **options):
    session = make(plan, **options)
    for update in range(updates):
        session.train_batch(rows(plan, update))
    return session


class Thing:
    """Anything with a state dict."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Two(nn.Module):
    """Two linears; the second one is used on demand."""

    def __init__(self, norm: bool = False):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()

    def forward(self, rows, both=False):
        values = self.norm(self.a(rows))
        return self.b(values) if both else values


def loss(module, batch):
    return module(batch["rows"], batch["both"]).square().sum(), len(batch["rows"])


def batch(update: int, *, both: bool):
    return {"rows": torch.randn(3, 4, generator=torch.Generator().manual_seed(update * 7 + rank())), "both": both}

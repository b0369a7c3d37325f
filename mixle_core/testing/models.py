"""A small language model in plain torch with everything that tells gradients apart, and its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mixle_core.hookspecs import hookimpl
from mixle_core.layout import Boundary, ModelLayout, ModuleLayout, Replica, Role, Shard, Term
from mixle_core.plan import ParallelPlan

VOCAB, HIDDEN, HEADS, HEAD_DIM = 32, 16, 4, 4
PAD = 0
"""Token id without a loss."""


class ToyBlock(nn.Module):
    """Norm, fused gate and up projections, a scale shared by all heads, a down projection with bias, an optional branch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * HEADS * HEAD_DIM)
        self.head_scale = HeadScale()
        self.down = nn.Linear(HEADS * HEAD_DIM, HIDDEN)
        self.branch = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, use_branch: bool = True) -> torch.Tensor:
        """Shape [rows, length, HIDDEN] in and out."""
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, -1)
        hidden = hidden + self.down(self.head_scale(F.silu(gate) * up))
        return hidden + self.branch(hidden) if use_branch else hidden


class HeadScale(nn.Module):
    """One weight of size HEAD_DIM for all heads, however many this rank has: partial under tp."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HEAD_DIM))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Values near one."""
        nn.init.normal_(self.weight, mean=1.0, std=0.2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Shape [rows, length, heads * HEAD_DIM] in and out."""
        heads: torch.Tensor = values.unflatten(-1, (-1, HEAD_DIM)) * self.weight
        return heads.flatten(-2)


class ToyLM(nn.Module):
    """A causal model without attention; `use_branch` says which blocks run their branch."""

    def __init__(self, blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, use_branch: bool = True, skip_last: bool = False) -> torch.Tensor:
        """Logits of shape [rows, length, VOCAB]."""
        hidden = self.embed(ids)
        for block in list(self.blocks)[: -1 if skip_last else None]:
            hidden = block(hidden, use_branch)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def toy_model() -> nn.Module:
    """On meta, filled by `attach` from the seed."""
    with torch.device("meta"):
        return ToyLM()


def tied_toy_model() -> nn.Module:
    """The same with one weight for embedding and head."""
    with torch.device("meta"):
        return ToyLM(tied=True)


def next_token_loss(module: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """Summed loss and token count of ids (or of a dict with `ids` and keyword arguments of the model); PAD has no loss."""
    ids, options = (batch, {}) if isinstance(batch, torch.Tensor) else (batch["ids"], {k: v for k, v in batch.items() if k != "ids"})
    output = module(ids, **options)
    logits = output.logits if hasattr(output, "logits") else output
    targets = ids[:, 1:].flatten()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=PAD, reduction="sum")
    return loss, int((targets != PAD).sum())


def token_batch(update: int, backward: int, data_rank: int, *, rows: int = 2, length: int = 8, vocab: int = VOCAB) -> torch.Tensor:
    """Ids of shape [rows, length] without PAD, the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(1 + update * 10007 + backward * 101 + data_rank)
    return torch.randint(1, vocab, (rows, length), generator=generator)


class ToyLayout:
    """A layout plugin for ToyLM, as an object to pass in code. `wrong` replaces roles, to see them found out."""

    def __init__(self, wrong: Mapping[str, Role] | None = None) -> None:
        self.wrong = dict(wrong or {})

    @hookimpl
    def declare_layout(self, model: Any, plan: ParallelPlan) -> ModelLayout | None:
        """Roles on tp of every parameter of a ToyLM."""
        if not isinstance(model, ToyLM):
            return None
        between = Shard(1) if plan.sequence_parallel else Replica("complete")
        token_wise: Role = Replica("partial") if plan.sequence_parallel else Replica("complete")
        enter, leave = Boundary(outside=between, inside=Replica("partial")), Boundary(outside=between, inside=Term())
        fused = Shard(0, unit=HEAD_DIM, parts=(HEADS * HEAD_DIM, HEADS * HEAD_DIM), unit_name="head")
        vocabulary = ModuleLayout(
            parameters={"weight": Shard(0)}, lookup="weight", output=Boundary(outside=Replica("complete"), inside=Term())
        )
        modules = {
            "embed": vocabulary,
            "blocks.*.norm": ModuleLayout(parameters={"{weight,bias}": self.wrong.get("norm", token_wise)}),
            "blocks.*.gate_up": ModuleLayout(parameters={"{weight,bias}": fused}, inputs={0: enter}),
            "blocks.*.head_scale": ModuleLayout(parameters={"weight": self.wrong.get("head_scale", Replica("partial"))}),
            "blocks.*.down": ModuleLayout(
                parameters={"weight": Shard(1, unit=HEAD_DIM), "bias": Replica("partial")}, output=leave, once=("bias",)
            ),
            "blocks.*.branch": ModuleLayout(parameters={"{weight,bias}": token_wise}),
            "norm": ModuleLayout(parameters={"{weight,bias}": token_wise}),
            "head": ModuleLayout(
                parameters={"weight": Shard(0)}, inputs={0: enter}, output=Boundary(outside=Replica("complete"), inside=Shard(-1))
            ),
        }
        if plan.sequence_parallel:
            modules["blocks.0"] = ModuleLayout(inputs={0: Boundary(outside=Replica("complete"), inside=Shard(1))})
        return ModelLayout(axis="tp", modules=modules, units=("blocks.*",))

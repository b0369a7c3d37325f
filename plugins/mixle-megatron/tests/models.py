"""The models and the loss that these tests train."""

from __future__ import annotations

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

"""What a verification feeds a model with, when nobody says more about it than its module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mixle_core.errors import UsageError
from mixle_core.runtime.contracts import Loss
from mixle_core.runtime.models import forward_names, vocabulary_size


def causal_lm_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token loss of `ids` (shape [rows, length], per data rank) and its number of tokens."""
    output: Any = module(input_ids=ids) if "input_ids" in forward_names(module) else module(ids)
    logits = output.logits if hasattr(output, "logits") else output
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return loss, ids[:, 1:].numel()


def random_input(model: nn.Module, rows: int, length: int, what: str) -> tuple[Callable[[torch.Generator], torch.Tensor], Loss]:
    """What draws one microbatch that the model takes (shape [rows, length] of ids, or [rows, features]), and a loss over its output.

    Args:
        what: the command that asks, for its error.

    Raises:
        UsageError: a model for which no input can be made.
    """
    vocab = vocabulary_size(model)
    width = None if vocab else next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), None)
    if vocab is None and width is None:
        raise UsageError(f"{what}: the model has neither an embedding nor a Linear, so no input can be made for it")

    def draw(generator: torch.Generator) -> torch.Tensor:
        if vocab is not None:
            return torch.randint(0, vocab, (rows, length), generator=generator)
        return torch.randn(rows, int(width or 1), generator=generator)

    return draw, causal_lm_loss if vocab else squared_loss


def squared_loss(module: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum of squared outputs, for models that take no token ids; every row counts as one token."""
    output = module(rows)
    return output.float().pow(2).sum(), rows.shape[0]

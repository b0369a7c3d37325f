"""What a verification feeds a model with, when nobody says more about it than its module."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def causal_lm_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token loss of `ids` (shape [rows, length], per data rank) and its number of tokens."""
    named = "input_ids" in inspect.signature(type(unwrapped(module)).forward).parameters
    output: Any = module(input_ids=ids) if named else module(ids)
    logits = output.logits if hasattr(output, "logits") else output
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return loss, ids[:, 1:].numel()


def unwrapped(module: nn.Module) -> nn.Module:
    """What a wrapper holds as `module` (its forward names nothing but self and passes everything on), or the module itself."""
    inner = getattr(module, "module", None)
    named = [p for p in inspect.signature(type(module).forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return unwrapped(inner) if isinstance(inner, nn.Module) and len(named) == 1 else module


def squared_loss(module: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum of squared outputs, for models that take no token ids; every row counts as one token."""
    output = module(rows)
    return output.float().pow(2).sum(), rows.shape[0]


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids the model takes, or None when it has no embedding."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None:
        return int(size)
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)

"""What a verification feeds a model with, when nobody says more about it than its module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mixle_core.runtime.models import forward_names


def causal_lm_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token loss of `ids` (shape [rows, length], per data rank) and its number of tokens."""
    output: Any = module(input_ids=ids) if "input_ids" in forward_names(module) else module(ids)
    logits = output.logits if hasattr(output, "logits") else output
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return loss, ids[:, 1:].numel()


def squared_loss(module: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum of squared outputs, for models that take no token ids; every row counts as one token."""
    output = module(rows)
    return output.float().pow(2).sum(), rows.shape[0]

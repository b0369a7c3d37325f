"""Losses over batches of rows: summed over the targets, with their number, whatever the model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mixle_core import UsageError
from mixle_core.runtime import forward_names
from mixle_lm.rows import IGNORED


def call(module: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """Logits of shape [rows, length, vocabulary] from a model that returns them, or an object with `logits`.

    `input_ids` goes by that name where the forward has it, else by position; `position_ids` only where the forward names
    it. Never with a key/value cache: with one, transformers models ignore where documents end, and recomputation in the
    backward would append to it once more.
    """
    names = forward_names(module)
    options = {name: value for name, value in options.items() if name in names}
    if position_ids is not None and "position_ids" in names:
        options["position_ids"] = position_ids
    if "use_cache" in names:
        options["use_cache"] = False
    output: Any = module(input_ids=input_ids, **options) if "input_ids" in names else module(input_ids, **options)
    logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
    kept = 1 if "logits_to_keep" in options else input_ids.shape[1]
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != (input_ids.shape[0], kept):
        found = f"shape {list(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UsageError(
            f"the model returned {found} for ids of shape {list(input_ids.shape)}; "
            "expected logits of shape [rows, length, vocabulary], or an object that has them"
        )
    return logits


def causal_lm_loss(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed loss over all positions that have a target, and their number.

    For models that return logits, also those whose own loss is a mean: it is not asked for.

    Args:
        batch: `input_ids`, `targets` (one further on; -100 has no loss), perhaps `position_ids`; shape [rows, length].
    """
    logits = call(module, batch["input_ids"], batch.get("position_ids"))
    targets = batch["targets"]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss, int((targets != IGNORED).sum())


def last_token_loss(module: nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Summed loss at the last position of each row, and the number of rows that have a target there."""
    logits = call(module, batch["input_ids"], batch.get("position_ids"), logits_to_keep=1)
    targets = batch["targets"][:, -1]
    return F.cross_entropy(logits[:, -1].float(), targets, reduction="sum", ignore_index=IGNORED), int((targets != IGNORED).sum())

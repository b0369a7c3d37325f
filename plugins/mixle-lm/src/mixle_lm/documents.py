"""Whether a model keeps packed documents apart: seen, not assumed."""

from __future__ import annotations

import math

import numpy as np
import torch

from mixle_core.runtime import Session
from mixle_lm.losses import call
from mixle_lm.rows import Rows

_ROUNDING = 1e-4
"""Logits of a document that others do not touch differ by less, relative to their size; half precision included, since equal
inputs take equal roundings."""


def documents_separate(session: Session, rows: Rows) -> bool:
    """Run one row of two documents twice, with another first document, and see whether the second one's logits move.

    Collective. Attention models of transformers keep documents apart by `position_ids` that restart; models without such an
    argument, and layers with a running state (recurrent, state-space, convolution), do not.
    """
    mesh = session.reduction.mesh
    length = max(2, math.ceil(rows.length / mesh.plan.tp)) * mesh.plan.tp  # a row as it is trained: some layers look far back
    half = length // 2
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(rows.vocab_size, (1, size), generator=generator) for size in (half, length - half))
    other = (first + 1 + torch.randint(max(1, rows.vocab_size - 1), first.shape, generator=generator)) % rows.vocab_size  # nowhere the same
    positions = torch.from_numpy(np.concatenate([np.arange(half), np.arange(length - half)]))[None]
    with session.evaluating() as module:
        seen = [
            call(module, torch.cat([start, second], 1).to(mesh.device), positions.to(mesh.device))[:, half:].float()
            for start in (first, other)
        ]
    moved = float((seen[0] - seen[1]).abs().max() / seen[0].abs().max().clamp_min(1e-30))
    worst = mesh.all_reduce_control(torch.tensor([moved], dtype=torch.float64), torch.distributed.ReduceOp.MAX)
    return float(worst) <= _ROUNDING

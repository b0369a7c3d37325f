"""Text from a model, a token at a time: enough to look at what it learned, on every rank alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mixle_core import UsageError
from mixle_core.runtime import Session
from mixle_lm.losses import call
from mixle_lm.rows import read_token_ids, require_whole


def generate(
    session: Session,
    prompt: Any,
    *,
    vocab_size: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    eos_token_id: int | None,
    context: int | None,
) -> list[int]:
    """The ids that follow `prompt`. Collective: each token is one forward of all ranks over the whole text so far."""
    ids = _prompt(prompt, vocab_size)
    if not 0 <= temperature < math.inf:
        raise UsageError(f"temperature={temperature!r}: expected 0 (greedy) or above")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k={top_k}: expected at least 1")
    require_whole("max_new_tokens", max_new_tokens)
    if eos_token_id is not None and not 0 <= eos_token_id < vocab_size:
        raise UsageError(f"eos_token_id={eos_token_id}: expected an id of the vocabulary of {vocab_size}")
    mesh = session.reduction.mesh
    generator = torch.Generator().manual_seed(seed)
    new: list[int] = []
    with session.evaluating() as module:
        while len(new) < max_new_tokens:
            text = [*ids, *new] if context is None else [*ids, *new][-context:]
            # sequence parallelism cuts the length by tp; what fills it up comes later and is seen by nobody
            filler = -len(text) % mesh.plan.tp
            given = torch.tensor([[*text, *[0] * filler]], device=mesh.device)
            logits = call(module, given)[0, len(text) - 1].float().cpu()
            token = _pick(logits, temperature, top_k, generator)
            # one rank decides: copies of a model agree to the bit, sampling from them need not
            token = int(mesh.all_reduce_control(torch.tensor([float(token if mesh.rank == 0 else 0)], dtype=torch.float64)))
            new.append(token)
            if token == eos_token_id:
                break
    return new


def _prompt(prompt: Any, vocab_size: int) -> list[int]:
    array, starts = read_token_ids(prompt)
    if array.ndim != 1 or (starts is not None and len(starts) > 1):
        raise UsageError("prompt: expected the ids of one text")
    ids: Sequence[int] = array.tolist()
    odd = next((i for i in ids if not 0 <= i < vocab_size), None)
    if odd is not None:
        raise UsageError(f"prompt: token id {odd} is outside the model's vocabulary of {vocab_size}")
    return list(ids)


def _pick(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(torch.softmax((logits - logits.max()).double() / temperature, -1), 1, generator=generator))

"""Helpers for tests of mixle and of its plugins; from `mixle-core[testing]`."""

from __future__ import annotations

from mixle_core.testing.doubles import OwnsEverything, SumOwner
from mixle_core.testing.models import ToyLayout, ToyLM, next_token_loss, tied_toy_model, token_batch, toy_model
from mixle_core.testing.pool import Outcome, preload, run_ranks

__all__ = [
    "Outcome",
    "OwnsEverything",
    "SumOwner",
    "ToyLM",
    "ToyLayout",
    "next_token_loss",
    "preload",
    "run_ranks",
    "tied_toy_model",
    "token_batch",
    "toy_model",
]

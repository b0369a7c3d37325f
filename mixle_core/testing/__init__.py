"""Helpers for tests of mixle and of its plugins; from `mixle-core[testing]`."""

from __future__ import annotations

from mixle_core.testing.conformance import PluginConformance
from mixle_core.testing.conformance_rules import NewCheckWarning, check
from mixle_core.testing.doubles import OwnsEverything, SumOwner
from mixle_core.testing.models import ToyLayout, ToyLM, next_token_loss, tied_toy_model, token_batch, toy_model
from mixle_core.testing.pool import Outcome, preload, run_ranks

__all__ = [
    "NewCheckWarning",
    "Outcome",
    "OwnsEverything",
    "PluginConformance",
    "SumOwner",
    "ToyLM",
    "ToyLayout",
    "check",
    "next_token_loss",
    "preload",
    "run_ranks",
    "tied_toy_model",
    "token_batch",
    "toy_model",
]

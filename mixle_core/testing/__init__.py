"""Helpers for tests of mixle and of its plugins; from `mixle-core[testing]`."""

from __future__ import annotations

from mixle_core.testing.pool import Outcome, run_ranks

__all__ = ["Outcome", "run_ranks"]

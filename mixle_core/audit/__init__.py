"""Comparing distributed training with one process, by name."""

from __future__ import annotations

from mixle_core.audit.compare import assemble, relative_error
from mixle_core.audit.verify import UpdateReport, VerifyReport, reference_model, verify

__all__ = ["UpdateReport", "VerifyReport", "assemble", "reference_model", "relative_error", "verify"]

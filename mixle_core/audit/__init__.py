"""Comparing distributed training with one process, by name."""

from __future__ import annotations

from mixle_core.audit.classify import KINDS, Groups, Verdict, classify
from mixle_core.audit.compare import assemble, relative_error
from mixle_core.audit.matrix import Cell, CellReport, cells, verify_matrix
from mixle_core.audit.verify import UpdateReport, VerifyReport, reference_model, verify
from mixle_core.audit.window import AuditReport, audit

__all__ = [
    "KINDS",
    "AuditReport",
    "Cell",
    "CellReport",
    "Groups",
    "UpdateReport",
    "Verdict",
    "VerifyReport",
    "assemble",
    "audit",
    "cells",
    "classify",
    "reference_model",
    "relative_error",
    "verify",
    "verify_matrix",
]

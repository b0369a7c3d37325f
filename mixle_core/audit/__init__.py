"""Comparing distributed training with one process, by name.

`audit` and what it needs come without the runtime; `verify`, the matrix and `infer_layout` load it when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mixle_core.audit.classify import KINDS, Groups, Verdict, classify
from mixle_core.audit.compare import assemble, assemble_copies, relative_error
from mixle_core.audit.window import AuditReport, audit

if TYPE_CHECKING:
    from mixle_core.audit.infer import InferredLayout, infer_layout, run_model
    from mixle_core.audit.infer_roles import ParameterFinding
    from mixle_core.audit.matrix import Cell, CellReport, cells, verify_matrix
    from mixle_core.audit.verification import UpdateReport, VerifyReport, reference_model, verify

_LATER = {
    **dict.fromkeys(("InferredLayout", "infer_layout", "run_model"), "mixle_core.audit.infer"),
    "ParameterFinding": "mixle_core.audit.infer_roles",
    **dict.fromkeys(("Cell", "CellReport", "cells", "verify_matrix"), "mixle_core.audit.matrix"),
    **dict.fromkeys(("UpdateReport", "VerifyReport", "reference_model", "verify"), "mixle_core.audit.verification"),
}

__all__ = [
    "KINDS",
    "AuditReport",
    "Cell",
    "CellReport",
    "Groups",
    "InferredLayout",
    "ParameterFinding",
    "UpdateReport",
    "Verdict",
    "VerifyReport",
    "assemble",
    "assemble_copies",
    "audit",
    "cells",
    "classify",
    "infer_layout",
    "reference_model",
    "relative_error",
    "run_model",
    "verify",
    "verify_matrix",
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'mixle_core.audit' has no attribute {name!r}")

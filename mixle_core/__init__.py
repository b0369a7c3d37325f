"""mixle: every gradient declared, arbitrated, executed once and auditable.

The kernel's names come without torch; `explain`, `attach` and `prepare` load the runtime, and torch, when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mixle_core.errors import (
    AgreementError,
    CapabilityError,
    DeclarationError,
    LayoutError,
    LedgerError,
    MixleError,
    OwnershipError,
    PlanError,
    PluginError,
    UsageError,
)
from mixle_core.hookspecs import hookimpl
from mixle_core.layout import (
    Boundary,
    Layouts,
    ModelLayout,
    ModuleLayout,
    ParameterLayout,
    Replica,
    Role,
    Shard,
    Term,
)
from mixle_core.ownership import AxisClaim, Bid, Claim, OwnershipTable, Refusal, Row, exactly_one
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import InstalledPlugin, LoadedPlugins, installed_plugins, load_plugins
from mixle_core.receipts import Gradient, OwnerReceipt, OwnerReduction, StepReceipt

if TYPE_CHECKING:
    from mixle_core.runtime import Reduction, Session, attach, explain, get_training_backend, prepare

__version__ = "0.1.0"

_RUNTIME = ("Reduction", "Session", "attach", "explain", "get_training_backend", "prepare")

__all__ = [
    "AgreementError", "AxisClaim", "Bid", "Boundary", "CapabilityError", "Claim", "DeclarationError", "Gradient", "InstalledPlugin",
    "LayoutError", "Layouts", "LedgerError", "LoadedPlugins", "MixleError", "ModelLayout", "ModuleLayout", "OwnerReceipt",
    "OwnerReduction", "OwnershipError", "OwnershipTable", "ParallelPlan", "ParameterLayout", "PlanError", "PluginError", "Reduction",
    "Refusal", "Replica", "Role", "Row", "Session", "Shard", "StepReceipt", "Term", "UsageError", "attach", "exactly_one", "explain",
    "get_training_backend", "hookimpl", "installed_plugins", "load_plugins", "prepare",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _RUNTIME:
        return getattr(importlib.import_module("mixle_core.runtime"), name)
    raise AttributeError(f"module 'mixle_core' has no attribute {name!r}")

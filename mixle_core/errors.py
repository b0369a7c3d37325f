"""Every error a user can cause. Each says what was found, what was expected, and ends with the way out."""

from __future__ import annotations

from collections.abc import Iterable


class MixleError(Exception):
    """Base of all errors raised by mixle; the command line prints its text without a traceback."""


class PlanError(MixleError, ValueError):
    """A plan whose numbers cannot be true."""


class CapabilityError(MixleError):
    """A composition that no loaded plugin executes, or that one of them refuses."""


class LayoutError(MixleError, ValueError):
    """A declaration that does not fit the model."""


class OwnershipError(MixleError):
    """A parameter or axis with no owner or with several."""


class PluginError(MixleError):
    """A plugin that is missing, broken, doubled or breaks the contract of its hooks."""


class AgreementError(MixleError):
    """Ranks that prepared different things."""


class LedgerError(MixleError):
    """A parameter that was not reduced exactly once in an update."""


class DeclarationError(MixleError):
    """A declared role that the first update contradicts."""


class UsageError(MixleError, ValueError):
    """Input or a call order that cannot be right."""


def explain_failure(rule: str, lines: Iterable[str], way_out: str, *, limit: int = 12) -> str:
    """Compose an error text: the rule, its items (one line for one item, else a line each, the first `limit`), the way out."""
    items = list(lines)
    if len(items) <= 1:
        return "; ".join([": ".join([rule, *items]), f"way out: {way_out}"])
    shown = [f"  {line}" for line in items[:limit]]
    if len(items) > limit:
        shown.append(f"  ... and {len(items) - limit} more")
    return "\n".join([rule, *shown, f"way out: {way_out}"])

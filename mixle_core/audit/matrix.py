"""The cells in which one plan is compared with one process: windows, clipping, precision, and kinds of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch import nn

from mixle_core.audit.verification import Batch, VerifyReport, verify
from mixle_core.errors import CapabilityError, LayoutError
from mixle_core.plan import ParallelPlan
from mixle_core.runtime.models import Plugins

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Largest error that passes, by precision."""

Build = Callable[[], nn.Module]


@attrs.frozen(eq=False)
class Cell:
    """One way to train under a plan.

    Args:
        name: in words.
        plan: with what the cell changes of it.
        windows: backwards of each of the three updates.
        clip: global norm to clip to, or None.
        change: applied to every model that is built; raises LayoutError when the model has nothing of the kind.
    """

    name: str
    plan: ParallelPlan
    windows: tuple[int, ...]
    clip: float | None = None
    change: Callable[[nn.Module], None] | None = None


@attrs.frozen
class CellReport:
    """What one cell showed: a report and whether it passed, or why it was passed over."""

    name: str
    report: VerifyReport | None
    passed: bool
    tolerance: float
    not_run: str | None = None


def cells(plan: ParallelPlan, *, full: bool) -> Iterator[Cell]:
    """The cells of `plan`: windows and clipping, and with `full` also precision, kinds of parameters and recomputation."""
    for name, accumulation, windows in (("1 backward", 1, (1, 1, 1)), ("4 backwards", 4, (4, 4, 4)), ("short windows", 4, (4, 3, 1))):
        changed = attrs.evolve(plan, microbatches=1, gradient_accumulation_steps=accumulation)
        yield Cell(name, changed, windows)
        yield Cell(f"{name}, clipped", changed, windows, clip=0.1)
    if not full:
        return
    changed = attrs.evolve(plan, microbatches=1, gradient_accumulation_steps=2)
    windows = (2, 1, 2)
    other = "bf16" if plan.precision == "fp32" else "fp32"
    yield Cell(other, attrs.evolve(changed, precision=other), windows)
    yield Cell("activation checkpointing", attrs.evolve(changed, activation_checkpointing=not plan.activation_checkpointing), windows)
    yield Cell("use that may vary", attrs.evolve(changed, unused_parameters=True), windows)
    yield Cell("frozen parameters", changed, windows, change=freeze_half)
    yield Cell("tied embedding", changed, windows, change=tie)


def freeze_half(model: nn.Module) -> None:
    """Freeze every other parameter."""
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 1)


def tie(model: nn.Module) -> None:
    """Tie head and embedding, as models of transformers do it.

    Raises:
        LayoutError: a model without a way to.
    """
    config: Any = getattr(model, "config", None)
    tied = getattr(model, "tie_weights", None)
    if not hasattr(config, "tie_word_embeddings") or not callable(tied):
        raise LayoutError("the model has no config.tie_word_embeddings and tie_weights()")
    if config.tie_word_embeddings:
        raise LayoutError("the model ties them already")
    config.tie_word_embeddings = True
    tied()


def verify_matrix(
    build: Build,
    chosen: Sequence[Cell],
    *,
    loss: Any,
    batch: Batch,
    tolerance: float | None = None,
    seed: int = 0,
    backend: str | Sequence[str] | None = None,
    plugins: Plugins = None,
    strict: bool = False,
    done: Callable[[CellReport], None] | None = None,
) -> tuple[CellReport, ...]:
    """Compare each cell with one process. Collective; a cell that a plugin refuses, or that the model has nothing for, says why.

    Args:
        tolerance: for fp32; None takes the usual one.
        strict: as in `verify`.
        done: called with each report as it comes.
    """
    reports = []
    for cell in chosen:
        limit = TOLERANCE[cell.plan.precision] if tolerance is None or cell.plan.precision != "fp32" else tolerance

        def changed(cell: Cell = cell) -> nn.Module:
            model = build()
            if cell.change is not None:
                cell.change(model)
            return model

        try:
            changed()  # what the model has nothing for shows on every rank alike, before anything is attached
            report = verify(
                changed,
                cell.plan,
                loss=loss,
                batch=batch,
                windows=cell.windows,
                max_grad_norm=cell.clip,
                seed=seed,
                backend=backend,
                plugins=plugins,
                strict=strict,
            )
            found = CellReport(cell.name, report, report.passed(limit), limit)
        except (CapabilityError, LayoutError) as error:
            found = CellReport(cell.name, None, passed=True, tolerance=limit, not_run=str(error))
        reports.append(found)
        if done is not None:
            done(found)
    return tuple(reports)

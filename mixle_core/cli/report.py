"""Tables for people: the ownership table, memory, verification."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from mixle_core.audit import CellReport, VerifyReport
from mixle_core.errors import UsageError
from mixle_core.layout import Layouts
from mixle_core.ownership import OwnershipTable, pending_axes
from mixle_core.plan import ParallelPlan

_ADAM_STATES = 2
_STATE_BYTES = 4


@attrs.frozen
class Memory:
    """Bytes per rank for what training keeps between forwards; activations are not in it."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer


def memory_per_rank(plan: ParallelPlan, layouts: Layouts, table: OwnershipTable) -> Memory:
    """Parameters, their gradients and two fp32 states of AdamW on one rank, slices rounded up."""
    rows = {row.name: row for row in table.rows}
    sizes = {axis: plan.size(axis) for axis in plan.active}
    parameters = gradients = optimizer = 0
    for name, layout in layouts.parameters.items():
        row = rows.get(name)
        elements = math.prod(layout.local_shape(sizes))
        stored = row.stored if row else tuple(a for a in pending_axes(plan, layout) if any(a in r.stored for r in table.rows))
        elements = math.ceil(elements / math.prod(plan.size(axis) for axis in stored))
        parameters += elements * layout.itemsize
        if row:
            gradients += elements * layout.itemsize
            optimizer += elements * _STATE_BYTES * _ADAM_STATES
    return Memory(parameters, gradients, optimizer)


def human_bytes(number: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables when the output is a file."""
    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=170)


def ownership_table(table: OwnershipTable, *, by_parameter: bool = False) -> Table:
    """The table by pattern, or by parameter."""
    groups = [(row.name, [row]) for row in table.rows] if by_parameter else table.by_pattern()
    shown = Table(title=f"Ownership of {len(table)} trainable parameters, plan {table.plan.describe()}", title_justify="left")
    for column in ("parameter", "of", "owner", "role", "pending", "operation", "dtype", "group", "payload"):
        shown.add_column(column, justify="right" if column in ("of", "group", "payload") else "left", overflow="fold")
    for pattern, rows in groups:
        row = rows[0]
        payload = sum(r.payload_bytes for r in rows)
        shown.add_row(
            pattern, str(len(rows)), row.owner, row.role_text(), " ".join(row.pending) or "-", row.operation_text(),
            row.dtype.removeprefix("torch."), str(row.group_size), human_bytes(payload),
        )  # fmt: skip
    return shown


def verify_table(report: VerifyReport) -> Table:
    """One line per update."""
    shown = Table(title=f"Against one process, plan {report.plan.describe()}", title_justify="left")
    for column in ("update", "tokens", "gradients", "worst gradient", "norm", "inf norm", "parameters", "worst parameter", "copies"):
        shown.add_column(column, overflow="fold")
    for index, update in enumerate(report.updates):
        shown.add_row(
            str(index), str(update.num_tokens), f"{update.gradient_error:.1e}", update.worst_gradient, f"{update.norm_error:.1e}",
            f"{update.inf_norm_error:.1e}", f"{update.parameter_error:.1e}", update.worst_parameter,
            "equal" if update.copies_equal else "DIFFER",
        )  # fmt: skip
    return shown


def cell_line(found: CellReport) -> str:
    """One cell of a verification: its errors, the worst parameter, and what is wrong with it."""
    if found.report is None:
        return f"{found.name:32} not run: {found.not_run}"
    updates = found.report.updates
    gradients, parameters = (max(updates, key=lambda u: u.gradient_error), max(updates, key=lambda u: u.parameter_error))
    norm = max(max(update.norm_error, update.inf_norm_error) for update in updates)
    cause = next((f"; the worst gradient is {u.cause}" for u in updates if u.cause and not found.passed), "")
    worst = gradients.worst_gradient if gradients.gradient_error >= parameters.parameter_error else parameters.worst_parameter
    return (
        f"{found.name:32} {'right' if found.passed else 'WRONG'}  gradients {gradients.gradient_error:.1e}  norm {norm:.1e}  "
        f"parameters {parameters.parameter_error:.1e}  worst {worst}{cause}"
    )


def save_table(table: OwnershipTable, path: Path) -> None:
    """Write the ownership table as Markdown, one line for each pattern, or as JSON, one entry for each parameter.

    Raises:
        UsageError: another suffix, or a place that cannot be written.
    """
    if path.suffix not in (".md", ".json"):
        raise UsageError(f"{path}: expected a name that ends in .md or .json")
    if path.suffix == ".json":
        text = json.dumps({**table.as_dict(), "digest": table.digest}, indent=1)
    else:
        lines = [f"Ownership of {len(table)} trainable parameters, plan {table.plan.describe()}, digest {table.digest[:16]}", ""]
        lines += ["| parameter | of | owner | role | pending | operation | payload |", "|---|---|---|---|---|---|---|"]
        for pattern, rows in table.by_pattern():
            payload = human_bytes(sum(row.payload_bytes for row in rows))
            cells = (
                pattern,
                len(rows),
                rows[0].owner,
                rows[0].role_text(),
                " ".join(rows[0].pending) or "-",
                rows[0].operation_text(),
                payload,
            )
            lines.append(f"| {' | '.join(map(str, cells))} |".replace("*", "\\*"))
        text = "\n".join(lines)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise UsageError(f"{path} could not be written: {error.strerror or error}") from error


def explain_json(arbitration: Any, memory: Memory, seconds: float) -> dict[str, Any]:
    """Everything `mixle explain` shows, for programs."""
    table: OwnershipTable = arbitration.table
    return {
        **table.as_dict(),
        "digest": table.digest,
        "memory_bytes_per_rank": {**attrs.asdict(memory), "total": memory.total, "activations_included": False},
        "payload_bytes_per_update": sum(row.payload_bytes for row in table.rows),
        "declined": [{"plugin": who, "reason": refusal.reason, "remedy": refusal.remedy} for who, refusal in arbitration.refusals],
        "planning_s": seconds,
    }

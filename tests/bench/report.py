"""Medians, intervals, and the Markdown page."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RIGHT = 1e-5
"""Largest relative error of any gradient up to which a contender counts as right."""

DISTRIBUTIONS = ("torch", "transformers", "lightning-fabric", "accelerate", "numpy", "mixle-core")


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """A confidence interval of the median from order statistics: low, high, and its exact level (95 % or more where possible).

    The k-th smallest and k-th largest of n enclose the median unless fewer than k values lie on one side of it.
    """
    ordered, number = sorted(values), len(values)
    best = (ordered[0], ordered[-1], 1.0 - 2.0**-number * 2)
    for k in range(1, number // 2 + 1):
        level = 1.0 - 2.0 * sum(math.comb(number, i) for i in range(k)) / 2.0**number
        if level < 0.95:
            break
        best = (ordered[k - 1], ordered[-k], level)
    return best


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median of the paired ratios and its interval."""
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, high, level = interval(paired)
    return {"ours": statistics.median(ours), "theirs": statistics.median(theirs), "median": statistics.median(paired)} | {
        "low": low,
        "high": high,
        "level": level,
        "pairs": len(paired),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown; the first column is text, the others are aligned right."""
    lines = [list(map(str, row)) for row in rows]
    assert all(len(line) == len(head) for line in lines), head
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1), *("| " + " | ".join(line) + " |" for line in lines)]
    )


def machine() -> str:
    """Processor, cores, memory, load and versions, without names of the machine."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {_version(name)}" for name in DISTRIBUTIONS)
    return (
        f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, {platform.system()} {platform.machine()}, {cpu}, {os.cpu_count()} cores, "
        f"{memory:.0f} GiB, load {os.getloadavg()[0]:.1f} at the start; Python {platform.python_version()}, {versions}."
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def errors(found: dict[str, Any]) -> list[str]:
    """Cells: the largest relative error with one and with two batches per update; the name where it is wrong."""
    cells = [f"{error:.1e}" + ("" if error <= RIGHT else f" **wrong**: {name}") for error, name in found["errors"].values()]
    return [*cells, "-"][:2]


def is_right(found: dict[str, Any]) -> bool:
    """Whether a contender runs here and is right with one batch per update, which is what is timed."""
    return "error" not in found and found["errors"][1][0] <= RIGHT


def size(number: float) -> str:
    """Bytes in a unit that shows three digits."""
    for unit in ("B", "KiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.2f} MiB"

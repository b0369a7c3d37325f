"""How training looks to who started it: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mixle_core import StepReceipt

_LINES = 20
"""So many lines tell of a whole run where there is no terminal."""


def shown(receipts: Iterator[StepReceipt], total: int, first_rank: bool, progress: bool | None) -> Iterator[StepReceipt]:
    """Pass the receipts on; the first rank shows how far they are.

    Args:
        progress: False shows nothing; None shows a bar on a terminal and nothing elsewhere; True shows lines elsewhere.
    """
    out = Console(highlight=False)
    if not first_rank or progress is False or (progress is None and not out.is_terminal):
        yield from receipts
        return
    started = time.perf_counter()
    tokens = 0
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task("training", total=total, status="")
        for number, receipt in enumerate(receipts, 1):
            tokens += receipt.num_tokens or 0
            status = _status(receipt, tokens / max(time.perf_counter() - started, 1e-9))
            bar.update(task, advance=1, status=status)
            if not out.is_terminal and (number % max(1, total // _LINES) == 0 or number in (1, total)):
                filled = 24 * number // total
                out.print(f"training [{'#' * filled}{'.' * (24 - filled)}] {number}/{total} {status}", markup=False, soft_wrap=True)
            yield receipt


def _status(receipt: StepReceipt, tokens_per_s: float) -> str:
    skipped = f" SKIPPED ({receipt.skipped})" if receipt.skipped else ""
    return f"loss {receipt.loss:.3f} norm {receipt.grad_norm:.2f} lr {receipt.learning_rate:.1e} {tokens_per_s:,.0f} tokens/s{skipped}"

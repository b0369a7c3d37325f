"""The training loop over rows, and what it leaves behind."""

from __future__ import annotations

import csv
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from mixle_core import OwnershipTable, StepReceipt, UsageError
from mixle_core.runtime import Session
from mixle_lm.loader import RowBatch, RowLoader
from mixle_lm.progress import shown
from mixle_lm.rows import require_whole


@attrs.frozen(eq=False)
class FitResult:
    """What `fit` did.

    Args:
        receipts: one for each update, in order; equal on all ranks but for their local numbers.
        table: who reduced what.
        seconds: of the training loop, without set-up.
        documents_separate: whether a forward was seen not to let documents look at each other; None when the token ids
            have no documents.
        resumed: updates of the run before this fit, of the step that it went on from; None when it began anew.
        checkpoint: the step that holds what the fit ended with, where it was told to save.
    """

    receipts: tuple[StepReceipt, ...]
    table: OwnershipTable
    seconds: float
    documents_separate: bool | None = None
    resumed: int | None = None
    checkpoint: Path | None = None

    @property
    def num_tokens(self) -> int:
        """Loss tokens of all data ranks."""
        return sum(receipt.num_tokens or 0 for receipt in self.receipts)

    @property
    def tokens_per_s(self) -> float:
        """Loss tokens of all data ranks in a second."""
        return self.num_tokens / max(self.seconds, 1e-9)

    def save(self, path: str | Path) -> None:
        """Write the receipts: JSON lines for `.jsonl`, a table for `.csv`. Call it on one rank.

        Raises:
            UsageError: another suffix.
        """
        path = Path(path)
        rows = [as_json(receipt) for receipt in self.receipts]
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif path.suffix == ".csv":
            for row in rows:
                row["owners"] = " ".join(f"{o['owner']}:{o['num_collectives']}:{o['payload_bytes']}" for o in row["owners"])
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, [field.name for field in attrs.fields(StepReceipt)])
                writer.writeheader()
                writer.writerows(rows)
        else:
            raise UsageError(f"{path}: expected a name that ends in .jsonl or .csv")


def as_json(receipt: StepReceipt) -> dict[str, Any]:
    """The receipt's fields for JSON, which knows no NaN and no infinity: they become null."""
    odd = {key: None for key, value in receipt.as_dict().items() if isinstance(value, float) and not math.isfinite(value)}
    return receipt.as_dict() | odd


def cosine_schedule(
    steps: int, *, warmup: int = 0, floor: float = 0.05
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """A `schedule` for `fit` or `prepare`: linear warmup over `warmup` updates, then a cosine down to `floor` of the peak at `steps`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def num_batches(loader: RowLoader, steps: int | None, epochs: int | None, accumulation: int, *, done: int | None = None) -> int:
    """How many batches a fit takes: those of `steps` updates, or those that `epochs` (counted from the first) have left.

    Args:
        done: updates before a resume, which count as part of `steps`; with it, nothing may be left.

    Raises:
        UsageError: both, or numbers below 1, or nothing left.
    """
    if steps is not None and epochs is not None:
        raise UsageError(f"steps={steps} and epochs={epochs}: give one of them")
    if steps is not None:
        require_whole("steps", steps)
        return max(0, steps - (done or 0)) * accumulation
    wanted = 1 if epochs is None else epochs
    require_whole("epochs", wanted)
    left = loader.batches_left(wanted)
    if not left and done is None:
        raise UsageError(
            f"the loader stands at the end of epoch {loader.epoch + 1} and epochs={wanted}: nothing is left; give more epochs, or steps"
        )
    return left


def run(
    session: Session,
    loader: RowLoader,
    batches: int,
    *,
    callback: Callable[[StepReceipt], None] | None,
    progress: bool | None,
    saved: Callable[[Session, RowLoader], None],
) -> tuple[tuple[StepReceipt, ...], float]:
    """Train on the next `batches` batches and return the receipts of the updates and the seconds that took.

    Windows of accumulated batches go on from one epoch into the next; the last one of a fit may be short.

    Args:
        saved: called after each update, to save when its turn has come.
    """
    receipts: list[StepReceipt] = []
    updates = math.ceil(batches / session.plan.gradient_accumulation_steps)
    started = time.perf_counter()
    for receipt in shown(_updates(session, loader, batches), updates, session.reduction.mesh.rank == 0, progress):
        receipts.append(receipt)
        saved(session, loader)
        if callback is not None:
            callback(receipt)
    return tuple(receipts), time.perf_counter() - started


def _updates(session: Session, loader: RowLoader, batches: int) -> Iterator[StepReceipt]:
    for batch in itertools.islice(_forever(loader), batches):
        receipt = session.train_batch(batch.tensors, num_examples=batch.num_examples)
        if receipt.committed:
            yield receipt
    last = session.finish_accumulation()
    if last is not None:
        yield last


def _forever(loader: RowLoader) -> Iterator[RowBatch]:
    while True:
        yield from loader

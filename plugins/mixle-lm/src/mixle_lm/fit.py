"""The training loop over rows, and what it leaves behind."""

from __future__ import annotations

import csv
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


@attrs.frozen(eq=False)
class FitResult:
    """What `fit` did.

    Args:
        receipts: one for each update, in order; equal on all ranks but for their local numbers.
        table: who reduced what.
        seconds: of the training loop, without set-up.
        num_tokens: loss tokens of all data ranks.
        documents_separate: whether a forward was seen not to let documents look at each other; None when the token ids
            have no documents.
    """

    receipts: tuple[StepReceipt, ...]
    table: OwnershipTable
    seconds: float
    num_tokens: int
    documents_separate: bool | None = None

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


def num_updates(loader: RowLoader, steps: int | None, epochs: int | None, accumulation: int) -> int:
    """How many updates a fit makes: `steps`, or those that `epochs` (counted from the start of the first) have left.

    Raises:
        UsageError: both, or numbers below 1.
    """
    if steps is not None and epochs is not None:
        raise UsageError(f"steps={steps} and epochs={epochs}: give one of them")
    name, value = ("steps", steps) if steps is not None else ("epochs", 1 if epochs is None else epochs)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}: expected a whole number of at least 1")
    if steps is not None:
        return steps
    left = loader.batches_left(value)
    if not left:
        raise UsageError(
            f"the loader stands at the end of epoch {loader.epoch + 1} and epochs={value}: nothing is left; give more epochs, or steps"
        )
    return math.ceil(left / accumulation)


def run(
    session: Session,
    loader: RowLoader,
    updates: int,
    *,
    whole_epochs: int | None,
    callback: Callable[[StepReceipt], None] | None,
    progress: bool | None,
) -> tuple[tuple[StepReceipt, ...], float]:
    """Train `updates` updates and return their receipts and the seconds that took.

    Windows of accumulated batches go on from one epoch into the next; the last one of a fit may be short.
    """
    receipts: list[StepReceipt] = []
    started = time.perf_counter()
    for receipt in shown(_updates(session, loader, updates, whole_epochs), updates, session.reduction.mesh.rank == 0, progress):
        receipts.append(receipt)
        if callback is not None:
            callback(receipt)
    return tuple(receipts), time.perf_counter() - started


def _updates(session: Session, loader: RowLoader, updates: int, whole_epochs: int | None) -> Iterator[StepReceipt]:
    done = 0
    batches = _forever(loader, whole_epochs)
    while done < updates:
        batch = next(batches, None)
        receipt = session.finish_accumulation() if batch is None else session.train_batch(batch.tensors, num_examples=batch.num_examples)
        if receipt is None:
            return
        if receipt.committed:
            done += 1
            yield receipt
        if batch is None:
            return


def _forever(loader: RowLoader, whole_epochs: int | None) -> Iterator[RowBatch]:
    while whole_epochs is None or loader.epoch < whole_epochs:
        yield from loader

"""The training session: batches in, receipts out. One client of `attach`."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from mixle_core.errors import UsageError
from mixle_core.plan import ParallelPlan
from mixle_core.receipts import StepReceipt
from mixle_core.runtime.attaching import attach
from mixle_core.runtime.contracts import Loss
from mixle_core.runtime.groups import raise_everywhere
from mixle_core.runtime.models import Plugins
from mixle_core.runtime.optimizers import OptimizerSpec, Schedule, build_optimizers
from mixle_core.runtime.reduction import Reduction
from mixle_core.runtime.saving import Loaded, SaveHandle, load_training_state, save_training_state


def prepare(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    loss: Loss,
    optimizer: OptimizerSpec,
    schedule: Schedule | None = None,
    precision: str | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    backend: str | Sequence[str] | None = None,
    plugins: Plugins = None,
    device: torch.device | str | None = None,
    strict: bool = False,
) -> Session:
    """Attach `model` and give it a session that drives microbatches, reduction, clipping, optimizer and schedule.

    Args:
        loss: `(module, microbatch) -> (summed loss, number of loss tokens)`.
        optimizer: `parameters -> Optimizer`, or pattern over logical names -> that.
        schedule: `optimizer -> LRScheduler`, stepped once per update.
        precision: overrides `plan.precision`.
        max_grad_norm: clip the global norm to this; None leaves it.
        model, plan, seed, backend, plugins, device, strict: as in `attach`.

    Raises:
        MixleError: whatever stands in the way, on every rank.
    """
    _check_max_norm(max_grad_norm)
    if precision is not None:
        plan = attrs.evolve(plan, precision=precision)
    reduction = attach(model, plan, backend=backend, seed=seed, plugins=plugins, device=device, strict=strict)
    try:
        return Session(reduction, loss=loss, optimizer=optimizer, schedule=schedule, max_grad_norm=max_grad_norm)
    except Exception:
        reduction.close()
        raise


class Session:
    """Trains one attached model. `train_batch` commits an update when the window of accumulated batches is full.

    Attributes:
        reduction: the attached model's gradients; `reduction.table` is the ownership table.
        optimizers: pattern -> optimizer; `schedulers` likewise.
    """

    def __init__(
        self, reduction: Reduction, *, loss: Loss, optimizer: OptimizerSpec, schedule: Schedule | None, max_grad_norm: float | None
    ) -> None:
        _check_max_norm(max_grad_norm)
        self.reduction = reduction
        self.plan = reduction.mesh.plan
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedulers: dict[str, torch.optim.lr_scheduler.LRScheduler] = {}
        failure: Exception | None = None
        try:
            self.optimizers = build_optimizers(optimizer, reduction.table, reduction.build_optimizer)
            self.schedulers = {pattern: schedule(built) for pattern, built in self.optimizers.items()} if schedule else {}
        except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
            failure = error
        raise_everywhere(reduction.mesh, failure)
        self.num_skipped = 0
        self._loss = loss
        self._max_grad_norm = max_grad_norm
        self._loss_scale = 1.0
        self._compared = False
        self._digest = 0
        self._start_window()
        made = {f"optimizer {pattern}": (type(o).__name__, _plain(o.defaults)) for pattern, o in self.optimizers.items()}
        reduction.require_alike("session", {"max_grad_norm": max_grad_norm, **made})
        reduction.zero()  # a session before this one may have left a window half done

    @property
    def module(self) -> nn.Module:
        """The module that training calls."""
        return self.reduction.module

    @property
    def update(self) -> int:
        """Updates committed so far, skipped ones included."""
        return self.reduction.update

    def train_batch(self, batch: Any, *, num_examples: int | None = None) -> StepReceipt:
        """Run one batch of this rank: `plan.microbatches` backwards, and the update when the window is full.

        Args:
            batch: tensor, or dict, tuple or list of tensors; per rank, rows on dim 0. Ranks that differ only in model
                axes pass the same rows: compared by a hash before the first forward, and again at every update.
            num_examples: rows that count as examples in the receipt, when some are padding; None counts all.

        Raises:
            UsageError: fewer rows than microbatches, tensors that disagree about their number, or ranks of one data rank
                with different rows.
        """
        if self.reduction.undefined is not None:
            raise UsageError(self.reduction.undefined)
        pieces, rows = self._split(batch)
        if num_examples is not None and (not isinstance(num_examples, int) or not 0 <= num_examples <= rows):
            raise UsageError(f"num_examples={num_examples!r}: expected 0 to {rows}, the rows of the batch")
        with self._whole_window():
            if self.plan.world_size > self.plan.data_size:
                self._digest = batch_digest(batch, self._digest)
                if not self._compared:
                    self.reduction.require_same_rows(0, self._digest)
                self._compared = True
            return self._train(pieces, rows if num_examples is None else num_examples)

    def _train(self, pieces: list[Any], rows: int) -> StepReceipt:
        last_batch = self._batches + 1 == self.plan.gradient_accumulation_steps
        loss_sum, tokens = self.reduction.run(pieces, self._loss, loss_scale=self._loss_scale, last=last_batch)
        self._batches += 1
        self._tokens += tokens
        self._examples += rows
        self._loss_sum += float(loss_sum)
        receipt = StepReceipt(
            update=self.update,
            loss=float(loss_sum) / max(tokens, 1),
            num_local_tokens=tokens,
            num_local_examples=rows,
            microbatches=len(pieces),
            committed=False,
        )
        return self._commit(receipt) if last_batch else receipt

    def finish_accumulation(self) -> StepReceipt | None:
        """Commit a window that ended early; its mean is over the tokens it has. None when no batch is waiting.

        Collective: the ranks have to agree on whether a window is open.
        """
        if not self._batches:
            return None
        receipt = StepReceipt(
            update=self.update,
            loss=self._loss_sum / max(self._tokens, 1),
            num_local_tokens=0,
            num_local_examples=0,
            microbatches=0,
            committed=False,
        )
        with self._whole_window():
            return self._commit(receipt)

    @contextmanager
    def _whole_window(self) -> Iterator[None]:
        """What fails halfway takes its window with it: no gradient of it is left for the next."""
        try:
            yield
        except BaseException:
            self._start_window()
            self.reduction.zero()
            raise

    def _start_window(self) -> None:
        self._batches = self._tokens = self._examples = 0
        self._digest = 0
        self._loss_sum = 0.0

    def _commit(self, receipt: StepReceipt) -> StepReceipt:
        window = {
            "accumulation": self._batches,
            "num_update_local_tokens": self._tokens,
            "num_update_local_examples": self._examples,
        }
        reduced = self.reduction.finish(
            self._tokens,
            self._loss_sum,
            loss_scale=self._loss_scale,
            max_norm=self._max_grad_norm,
            num_examples=self._examples,
            batch_digest=self._digest,
        )
        self._start_window()
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers.values()]
        if reduced.skipped is None:
            for optimizer in self.optimizers.values():
                optimizer.step()
            for scheduler in self.schedulers.values():
                scheduler.step()
            # a power of two near 1/tokens keeps half-precision gradients in range and changes no fp32 digit
            self._loss_scale = 2.0 ** -round(math.log2(reduced.num_tokens))
        else:
            self.num_skipped += 1
        self.reduction.zero()
        return attrs.evolve(
            receipt,
            loss=reduced.loss,
            committed=True,
            **window,
            num_tokens=reduced.num_tokens,
            num_examples=reduced.num_examples,
            grad_norm=reduced.norm(),
            clip_factor=reduced.clip_factor,
            learning_rate=float(rates[0]) if rates else None,
            skipped=reduced.skipped,
            owners=reduced.owners,
        )

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """The module to call, in evaluation mode, without gradients, and outside the count of the update's traffic."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad(), self.reduction.uncounted():
                yield self.module
        finally:
            for module, training in modes:
                module.training = training

    def evaluate(self, batches: Iterable[Any], *, loss: Loss | None = None) -> float:
        """Mean loss per token over all batches of all data ranks, in evaluation mode. Collective.

        Ranks pass the same number of batches, since a sharded forward is a collective of its own.

        Args:
            loss: another one than training uses.
        """
        measure = loss or self._loss
        loss_sum, tokens = 0.0, 0
        with self.evaluating():
            for batch in batches:
                value, count = self.reduction.run([self._to_device(batch)], measure)
                loss_sum += float(value)
                tokens += count
        shared = torch.tensor([loss_sum, float(tokens)], dtype=torch.float64)
        total_loss, total_tokens = self.reduction.mesh.all_reduce_control(shared).tolist()
        if not total_tokens:
            raise UsageError("evaluate: no batch had a loss token on any rank")
        return float(total_loss / total_tokens)

    def save(
        self,
        root: str | Path,
        *,
        asynchronous: bool = False,
        state: Mapping[str, Any] | None = None,
        metadata: Any = None,
        keep: int | None = None,
        **options: Any,
    ) -> Path | SaveHandle:
        """Save everything that training goes on from, as the step `update` of `root`, between two updates. Collective.

        Args:
            root: directory of the run; each step becomes a directory in it.
            asynchronous: return a handle at once; the values are those of now. What fails is raised by its `wait()`, or at the next
                update that ends, on every rank.
            state: key -> anything with `state_dict()`, such as a loader.
            metadata: plain values, alike on every rank.
            keep: delete all but so many steps afterwards.
            **options: `checksum`, `wait_s`: as in `save_training_state`.

        Raises:
            UsageError: within a window of accumulated batches, whose gradients are not saved.
            CheckpointError: on every rank; nothing was committed.
        """
        if self._batches:
            raise UsageError(
                f"save: {self._batches} of {self.plan.gradient_accumulation_steps} batches of the window have run, and their gradients are "
                "not saved; save between updates, or call finish_accumulation() before"
            )
        numbers = {"num_skipped": self.num_skipped, "loss_scale": self._loss_scale}
        return save_training_state(
            self.reduction,
            self.optimizers,
            root,
            step=self.update,
            scheduler=self.schedulers,
            state=state,
            metadata=metadata,
            session=numbers,
            asynchronous=asynchronous,
            keep=keep,
            **options,
        )

    def load(self, root: str | Path, *, state: Mapping[str, Any] | None = None, missing_ok: bool = False, **options: Any) -> Loaded | None:
        """Go on from the newest committed step of `root` (or from a step's directory), saved under this plan or any other. Collective.

        Args:
            state: key -> what is filled by its `load_state_dict`.
            missing_ok: return None, and change nothing, where `root` has no step yet.
            **options: `skip`, `wait_s`: as in `load_training_state`.

        Raises:
            CheckpointError: on every rank. The session then refuses to train until another load succeeds.
        """
        self._start_window()
        self.reduction.zero()
        shared = {"scheduler": self.schedulers, "state": state, "missing_ok": missing_ok, **options}
        loaded = load_training_state(self.reduction, self.optimizers, root, **shared)
        if loaded is None:
            return None
        self.num_skipped = int(loaded.session.get("num_skipped", 0))
        self._loss_scale = float(loaded.session.get("loss_scale", 1.0))
        return loaded

    def close(self) -> None:
        """Remove the hooks of `attach`."""
        self.reduction.close()

    def _to_device(self, batch: Any) -> Any:
        return _map_tensors(batch, lambda tensor: tensor.to(self.reduction.mesh.device))

    def _split(self, batch: Any) -> tuple[list[Any], int]:
        rows: set[int] = set()
        batch = self._to_device(batch)
        _map_tensors(batch, lambda tensor: rows.add(tensor.shape[0]) if tensor.dim() else None)
        number = self.plan.microbatches
        if len(rows) != 1:
            raise UsageError(f"batch: tensors with {sorted(rows) or 'no'} rows on dim 0; expected one number of rows for all")
        (total,) = rows
        if total < number:
            raise UsageError(f"batch has {total} rows for microbatches={number}; pass at least one row for each microbatch")
        if number == 1:
            return [batch], total
        return [_map_tensors(batch, functools.partial(_piece, number, i)) for i in range(number)], total


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and words among `values`: what reads the same on every rank."""
    return {key: value for key, value in sorted(values.items()) if isinstance(value, (int, float, str, tuple, type(None)))}


def _check_max_norm(value: float | None) -> None:
    if value is not None and not value > 0:
        raise UsageError(f"max_grad_norm={value!r}: expected a number above 0, or None")


def batch_digest(batch: Any, start: int = 0) -> int:
    """CRC-32 of the tensors, numbers and words in `batch`, at some GiB a second; the order of a dict does not matter.

    Tensors on another device count by shape alone, to wait for none.
    """
    if isinstance(batch, Mapping):
        for key in sorted(batch, key=repr):
            start = batch_digest(batch[key], zlib.crc32(repr(key).encode(), start))
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            start = batch_digest(item, start)
    elif isinstance(batch, torch.Tensor):
        shape = tuple(batch.shape) if batch.layout is torch.strided else batch.layout
        start = zlib.crc32(repr((shape, batch.dtype)).encode(), start)
        if batch.layout is torch.strided and batch.device.type == "cpu" and batch.numel():
            start = zlib.crc32(batch.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data, start)
    elif isinstance(batch, (bool, int, float, str)):
        start = zlib.crc32(repr(batch).encode(), start)
    return start


def _piece(number: int, index: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.tensor_split(number)[index] if tensor.dim() else tensor


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with every tensor in nested dicts, tuples and lists changed; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value

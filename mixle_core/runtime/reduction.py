"""One checked reduction per update: the handle that `attach` returns."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mixle_core.errors import CapabilityError, LedgerError, UsageError
from mixle_core.ledger import Ledger
from mixle_core.receipts import Gradient, OwnerReceipt, OwnerReduction
from mixle_core.runtime.arbitration import Arbitration
from mixle_core.runtime.contracts import Loss, Owner, checked_loss
from mixle_core.runtime.gradients import Reduced, local_power_sum, multiply_
from mixle_core.runtime.groups import CONTROL, Mesh, Traffic, counted_traffic, raise_everywhere
from mixle_core.runtime.initialise import logical_parameters
from mixle_core.runtime.optimizers import Factory
from mixle_core.runtime.probe import Probe

_SAME_ROWS = ("pp", "tp")
"""Ranks that differ only on these axes train on the same rows."""


def _bad_number(max_norm: float | None, loss_scale: float) -> UsageError | None:
    if not 0 < loss_scale < math.inf:
        return UsageError(f"loss_scale={loss_scale!r}: expected a number above 0")
    wrong = max_norm is not None and not max_norm > 0
    return UsageError(f"max_norm={max_norm!r}: expected a number above 0, or None") if wrong else None


def _factor(rank: int) -> int:
    """An odd number below 2**13 that differs between most ranks."""
    return 1 + 2 * (zlib.crc32(str(rank).encode()) % 4096)


def _counted(owner: str) -> Traffic:
    return sum(counted_traffic(f"mixle:{owner}:").values(), Traffic())


class Reduction:
    """The gradients of one attached model: call `module`, run backwards, `finish` the update, step, `zero`.

    Attributes:
        module: the module to call in the loop.
        model: the module that was passed, for its attributes; `module` is what is called, in evaluation too.
        table: the ownership table.
        mesh: this rank's place in the plan.
        seed: that `attach` was given.
        background: says what failed beside the training, such as an asynchronous save; asked at every update, and raised on every rank.
        undefined: why parameters and optimizer are undefined, such as a load that failed halfway; nothing runs then.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        won: Arbitration,
        mesh: Mesh,
        owners: Mapping[str, Owner],
        seed: int,
        schedule: Callable[..., None] | None = None,
    ) -> None:
        self.model = model
        self.module = module
        self.table = won.table
        self.layouts = won.layouts
        self.plugins = won.plugins
        self.mesh = mesh
        self.update = 0
        self.seed = seed
        self.background: Callable[[], Exception | None] = lambda: None
        self.undefined: str | None = None
        self._owners = owners
        self._schedule = schedule
        rows = [row for row in won.table.rows if row.held_by(mesh.plan, mesh.rank)]
        self._ledger = Ledger({row.name: row.owner for row in rows})
        self._probe = Probe(won.table, mesh, seed) if any(row.model_replica_axes for row in won.table.rows) else None
        self._bound = logical_parameters(model, won.layouts.transparent)
        self._trainable = {row.name for row in rows}
        self._owned = {owner: {row.name for row in rows if row.owner == owner} for owner in owners}
        self._stopped: Exception | None = None
        self._traffic = {name: Traffic() for name in owners}
        self._fresh, self._finished = True, False
        self._inside = self._uncounted = False
        peers = mesh.plan.group_ranks(mesh.rank, _SAME_ROWS)
        # factors that add up to nothing over the ranks of one data rank, and differ, so that two faults do not cancel; small
        # enough for the sum of all products with 24 bits of digest to be exact in float64
        self._opposed = _factor(mesh.rank) if mesh.rank != peers[0] else -sum(map(_factor, peers[1:]))
        self._handles = [model.register_forward_pre_hook(self._guard)]
        self._forward: Any = None
        if module is not model:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        if mesh.plan.precision == "bf16":
            self._autocast_forward()
        self._read_traffic()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Logical name and parameter (per rank: a slice where the table says so), tied ones once, sorted by name."""
        yield from self._bound.items()

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context around forward and backward of every microbatch of an update but the last."""
        stack = ExitStack()
        for owner in self._owners.values():
            stack.enter_context(owner.no_sync())
        return stack

    def run(self, microbatches: Sequence[Any], loss: Loss, *, loss_scale: float = 1.0, last: bool = True) -> tuple[torch.Tensor, int]:
        """Forward and backward of a batch's microbatches, each in its turn, or as the schedule of a pipeline has them.

        Without gradients (under `torch.no_grad()`), forwards only. A model that adds losses of its own inside may have
        `set_loss_scale(scale)`: it is told before the forwards, and 1.0 afterwards.

        Args:
            loss: `(module, microbatch) -> (summed loss, number of loss tokens)`.
            loss_scale: what the losses are multiplied with before backward.
            last: whether the update ends with this batch.

        Returns:
            The summed loss (a float64 scalar, unscaled) and the number of loss tokens of this data rank.
        """
        if self.undefined is not None:
            raise UsageError(self.undefined)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        counts: list[int] = []

        def forward(module: nn.Module, microbatch: Any) -> torch.Tensor:
            value, count = checked_loss(loss(module, microbatch))
            if torch.is_grad_enabled() and (value.dim() or not value.requires_grad):
                raise UsageError(
                    f"loss returned a tensor of shape {list(value.shape)}: expected a summed scalar with a gradient, and a token count"
                )
            counts.append(count)
            total.add_(value.detach().double())  # stays on the device: reading it would wait for every microbatch
            return value

        tell = getattr(self.model, "set_loss_scale", lambda scale: None)
        tell(loss_scale)
        try:
            return self._run(microbatches, forward, total, counts, loss_scale, last=last)
        finally:
            tell(1.0)

    def _run(
        self,
        microbatches: Sequence[Any],
        forward: Callable[[nn.Module, Any], torch.Tensor],
        total: torch.Tensor,
        counts: list[int],
        loss_scale: float,
        *,
        last: bool,
    ) -> tuple[torch.Tensor, int]:
        if self._schedule is not None:
            with self.no_sync():  # a schedule ends with all its backwards; what is to be reduced is reduced at the end
                self._schedule(self.module, microbatches, forward, loss_scale)
            return self._from_the_stage_with_the_loss(total, sum(counts))
        for index, microbatch in enumerate(microbatches):
            with ExitStack() as stack:
                if not (last and index == len(microbatches) - 1):
                    stack.enter_context(self.no_sync())
                value = forward(self.module, microbatch)
                if torch.is_grad_enabled():
                    (value * loss_scale).backward()
        return total, sum(counts)

    def _from_the_stage_with_the_loss(self, total: torch.Tensor, tokens: int) -> tuple[torch.Tensor, int]:
        group = self.mesh.group(("pp",), CONTROL)
        if group is None:
            return total, tokens
        numbers = torch.stack([total, total.new_tensor(float(tokens))])
        torch.distributed.all_reduce(numbers, group=group)  # the other stages have zeros
        return numbers[0], round(float(numbers[1]))

    def build_optimizer(self, factory: Factory, names: Iterable[str] | None = None) -> torch.optim.Optimizer | None:
        """An optimizer over the trainable parameters that this rank holds, stepped as their owner needs it.

        Args:
            factory: `parameters -> Optimizer`.
            names: logical names; None for all.

        Returns:
            None when this rank holds none of them.

        Raises:
            CapabilityError: parameters of an owner that steps them itself, beside others.
        """
        chosen = self._trainable if names is None else self._trainable & set(names)
        wanted = [name for name in self._bound if name in chosen]
        for owner, mine in self._owned.items():
            build = getattr(self._owners[owner], "build_optimizer", None)
            if build is None or not mine & chosen:
                continue
            if chosen - mine:
                raise CapabilityError(
                    f"{owner} steps its parameters itself, and {min(chosen - mine)} is not one of them; give each owner's parameters an "
                    "optimizer of their own"
                )
            return build(factory, wanted)  # type: ignore[no-any-return]
        return factory([self._bound[name] for name in wanted]) if wanted else None

    def finish(
        self,
        num_tokens: int,
        loss_sum: float = 0.0,
        *,
        loss_scale: float = 1.0,
        max_norm: float | None = None,
        num_examples: int = 0,
        batch_digest: int = 0,
    ) -> Reduced:
        """End the update: reduce what is not reduced yet, check the ledger, and scale to the mean over all loss tokens.

        Collective. Exact also when every backward ran inside `no_sync()`, so a short trailing window needs nothing else.

        Args:
            num_tokens: loss tokens of this rank in this update; data ranks may differ, also by having none. Ranks that differ
                only in model axes see the same rows and pass the same number.
            loss_sum: this rank's summed loss, unscaled; only reported.
            loss_scale: what this rank's summed losses were multiplied with before backward; equal on all ranks.
            max_norm: clip the global norm to this, as `clip_` would, in the pass over the gradients that scales them.
            num_examples: rows of this rank in this update; only reported.
            batch_digest: a whole number, of the rows themselves; compared between ranks that differ only in model axes.

        Raises:
            LedgerError: a parameter that was not reduced exactly once, on every rank.
            DeclarationError: first update only: a declared role that the gradients contradict.
            UsageError: a fault that another rank found; ranks of one data rank that trained on different rows.
        """
        if self._stopped is not None:
            raise self._stopped
        gradients: dict[str, Gradient] = {}
        failure: Exception | None = self._changed() or self._finished_before() or _bad_number(max_norm, loss_scale) or self.background()
        square_sum = 0.0
        copies = self.mesh.plan.world_size // self.mesh.plan.data_size
        try:
            # judged after all collectives: a rank that stopped before one would leave the others waiting in it
            results = {name: owner.finish(self._observe) for name, owner in self._owners.items()}
            try:
                gradients = self._settle(results)
                square_sum = local_power_sum(gradients.values())
            except Exception as error:  # every rank has to learn of it before any raises
                failure = failure or error
            seen = (num_tokens * 1_000_003 + batch_digest) % 2**24
            numbers = [square_sum, num_tokens / copies, loss_sum / copies, num_examples / copies, float(failure is not None)]
            shared = torch.tensor([*numbers, seen * self._opposed, *self._order()], dtype=torch.float64)
            square_sum, tokens, loss, examples, failed, unlike, order, squares = self.mesh.all_reduce_control(shared).tolist()
        except Exception as error:  # this rank, or the one it waited for, is out of step with the others
            self._stopped = self.mesh.leave_word(self.update, failure or error)
            raise self._stopped from (None if self._stopped is error else error)
        self._fresh = self._finished = True
        if order * order != squares * self.mesh.plan.world_size:  # equal exactly when all ranks gave the same
            failure = failure or LedgerError(
                f"update {self.update}: the ranks called the model's units in different orders, left different ones out, or ended their "
                "windows differently, so that collectives met the wrong partner; run the same microbatches and units on every rank"
            )
        if failed or failure is not None:
            self._raise_everywhere(failure)
        if unlike:  # the ranks of one data rank count with factors that add up to nothing
            self._drop()
            self.require_same_rows(num_tokens, batch_digest)
        if self._probe is not None:
            try:
                self._probe.judge()
            except Exception:  # found alike on every rank; no gradient of it is left for another update
                self._drop()
                raise
            if self._probe.done:
                self._probe = None
        self.update += 1
        total = round(tokens)
        nonfinite: tuple[str, ...] = ()
        if not math.isfinite(square_sum):
            mine = [name for name, g in gradients.items() if g.tensor is not None and not bool(torch.isfinite(g.tensor).all())]
            nonfinite = tuple(sorted({name for names in self.mesh.gather_objects(mine) for name in names}))
        skipped = f"non-finite gradient: {', '.join(nonfinite[:3])}" if nonfinite else (None if total else "no loss token on any rank")
        scale = 1.0 / (total * loss_scale) if total else 1.0
        norm = math.sqrt(square_sum) * scale if skipped is None else 0.0
        clip_factor = max_norm / norm if max_norm is not None and norm > max_norm else 1.0
        if skipped is None:
            multiply_(gradients.values(), scale * clip_factor)
        return Reduced(
            gradients,
            self.mesh,
            square_sum=square_sum,
            scale=scale,
            clip_factor=clip_factor,
            num_tokens=total,
            num_examples=round(examples),
            loss=loss / total if total else 0.0,
            nonfinite=nonfinite,
            skipped=skipped,
            owners=self._read_traffic(),
        )

    def require_alike(self, what: str, values: Mapping[str, Any]) -> None:
        """Compare plain values of every rank, each key among the ranks that have it. Collective.

        Raises:
            UsageError: on every rank, naming the first key and two ranks that differ.
        """
        everyone = self.mesh.gather_objects({key: repr(value) for key, value in values.items()})
        seen: dict[str, tuple[int, str]] = {}
        for rank, theirs in enumerate(everyone):
            for key, value in theirs.items():
                first, known = seen.setdefault(key, (rank, value))
                if value != known:
                    raise UsageError(f"{what}: {key} is {value} on rank {rank} and {known} on rank {first}; pass the same on every rank")

    def require_same_rows(self, num_tokens: int, batch_digest: int) -> None:
        """Compare what ranks train on that differ only in model axes. Collective.

        Raises:
            UsageError: on every rank, naming the first two that differ.
        """
        seen = self.mesh.gather_objects((num_tokens, batch_digest))
        for rank, theirs in enumerate(seen):
            first = self.mesh.plan.group_ranks(rank, _SAME_ROWS)[0]
            if theirs != seen[first]:
                what = f"{theirs[0]} loss tokens against {seen[first][0]}" if theirs[0] != seen[first][0] else "other rows of equal number"
                raise UsageError(
                    f"update {self.update}: rank {rank} got another batch than rank {first} ({what}); ranks that differ only in "
                    f"{' and '.join(axis for axis in _SAME_ROWS if self.mesh.plan.size(axis) > 1)} train on the same rows: "
                    "draw them by the data rank, not by the rank"
                )

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave what happens inside, such as an evaluation, out of the receipt of the update."""
        before = {name: _counted(name) for name in self._owners}
        outermost, self._uncounted = not self._uncounted, True
        try:
            yield
        finally:
            if outermost:
                self._uncounted = False
                for name, was in before.items():
                    self._traffic[name] += _counted(name) - was

    def require_between_updates(self, what: str) -> None:
        """Refuse what needs whole updates, within one.

        Raises:
            UsageError: backwards have run whose update has not ended; parameters are undefined.
        """
        if self.undefined is not None:
            raise UsageError(self.undefined)
        if not self._fresh:
            raise UsageError(
                f"{what}: the window of update {self.update} is open, and its gradients are not saved; finish() or zero() it before"
            )

    def zero(self) -> None:
        """Drop all gradients; the next update starts from nothing.

        Raises:
            LedgerError: in strict mode: something wrote over a gradient between `finish` and here.
        """
        late = self.mesh.watch.late(self.update - 1) if self.mesh.watch is not None and self._finished else None
        self._drop()
        if late is not None:
            raise late

    def _drop(self) -> None:
        self._finished, self._fresh = False, True
        if self.mesh.watch is not None:
            self.mesh.watch.drop()
        for owner in self._owners.values():
            owner.zero()

    def close(self) -> None:
        """Remove the hooks. The model keeps its values, cut as they are; process groups stay for the next attach."""
        for owner in reversed(list(self._owners.values())):
            owner.close()
        self.mesh._stop_watch()
        for handle in self._handles:
            handle.remove()
        if self._forward is not None:
            self.model.forward = self._forward

    def _order(self) -> tuple[int, int]:
        order, self.mesh.order = self.mesh.order % 2**16, 0
        return order, order * order  # small enough for sums of both to be exact in float64

    def _observe(self, gradients: Mapping[str, torch.Tensor]) -> None:
        if self._probe is not None:
            self._probe.observe(gradients)

    def _settle(self, results: Mapping[str, OwnerReduction]) -> dict[str, Gradient]:
        """What the owners handed over, if it is all of what they own and the ledger agrees."""
        gradients: dict[str, Gradient] = {}
        for owner, result in results.items():
            odd = sorted(self._owned[owner] ^ result.gradients.keys())
            if odd:
                what = "no gradient for" if odd[0] in self._owned[owner] else "a gradient it does not own:"
                raise LedgerError(f"{owner} handed over {what} {odd[0]} ({len(odd)} in all)")
            gradients.update(result.gradients)
        unused = [name for name, gradient in gradients.items() if gradient.tensor is None]
        dropped = [name for name in unused if self._bound[name].grad is not None]
        if dropped:
            raise LedgerError(
                f"{self.table[dropped[0]].owner} calls {dropped[0]} unused ({len(dropped)} in all), but it has a gradient here"
            )
        for owner, result in results.items():
            self._ledger.record(owner, result.counts)
        self._ledger.close(unused, self.update)
        used, self.mesh.used = self.mesh.used, set()
        lost = [name for name in unused if name in used or any(result.counts.get(name) for result in results.values())]
        if lost:
            raise LedgerError(
                f"update {self.update}: {self.table[lost[0]].owner} handed over no gradient for {lost[0]} ({len(lost)} in all), which was "
                "used: what was accumulated was not reduced, and would not be trained"
            )
        if self.mesh.watch is not None:
            self.mesh.watch.judge(gradients.keys() - set(unused), self.update)
        if self._probe is not None:
            self._probe.require(gradients.keys() - set(unused))
        return gradients

    def _raise_everywhere(self, failure: Exception | None) -> None:
        self._drop()
        raise_everywhere(self.mesh, failure)

    def _read_traffic(self) -> tuple[OwnerReceipt, ...]:
        receipts = []
        for name in self._owners:
            now = _counted(name)
            spent, self._traffic[name] = now - self._traffic[name], now
            receipts.append(OwnerReceipt(name, len(self._owned[name]), spent.num_collectives, spent.payload_bytes))
        return tuple(receipts)

    def _changed(self) -> LedgerError | None:
        """Find parameters that were added, replaced, frozen or unfrozen since attach: nobody owns the new ones."""
        current = logical_parameters(self.model, self.layouts.transparent)
        changed = [f"{name}: added" for name in current.keys() - self._bound.keys()]
        for name, bound in self._bound.items():
            parameter = current.get(name)
            if parameter is None:
                changed.append(f"{name}: removed")
            elif parameter is not bound:
                changed.append(f"{name}: replaced by another parameter")
            elif parameter.requires_grad != (name in self._trainable):
                changed.append(f"{name}: {'unfrozen' if parameter.requires_grad else 'frozen'}")
        if not changed:
            return None
        return LedgerError(
            f"{len(changed)} parameters changed since attach ({'; '.join(sorted(changed)[:3])}); close() and attach anew after a change"
        )

    def _finished_before(self) -> UsageError | None:
        """Find a second `finish` on the gradients of the first, which would scale them once more."""
        if self._fresh and self._finished and any(parameter.grad is not None for parameter in self._bound.values()):
            return UsageError("finish() was called twice on the same gradients; run a backward after zero(), then finish()")
        return None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside = False

    def _guard(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._stopped is not None:
            raise UsageError(f"update {self.update} broke off, so the ranks are out of step; start them anew ({self._stopped})")
        if self.module is not self.model and not self._inside:
            raise UsageError(
                "the model was called around its owner, so nobody would reduce its gradients; call the module that attach returned"
            )
        if self._fresh:
            left = [name for name, parameter in self._bound.items() if parameter.grad is not None]
            if left:
                raise UsageError(
                    f"{left[0]} still holds the gradient of the last update ({len(left)} do); call zero() after the optimizer's step"
                )
            self._fresh = False

    def _autocast_forward(self) -> None:
        inner = self._forward = self.model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self.mesh.device.type, torch.bfloat16):
                return inner(*args, **kwargs)

        self.model.forward = forward

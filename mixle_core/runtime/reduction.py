"""`attach`: declare, arbitrate, agree, apply, initialise, install; then one checked reduction per update."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from mixle_core.errors import CapabilityError, LedgerError, PluginError, UsageError
from mixle_core.layout import Layouts, is_held
from mixle_core.ledger import Ledger
from mixle_core.ownership import LOCAL_OWNER, Bid, Row, exactly_one
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import LoadedPlugins
from mixle_core.receipts import Gradient, OwnerReceipt, OwnerReduction
from mixle_core.runtime.agreement import agreement_document
from mixle_core.runtime.arbitration import Arbitration, arbitration
from mixle_core.runtime.contracts import AxisExecutor, Loss, Observe, Owner, checked_loss
from mixle_core.runtime.gradients import Reduced, local_power_sum, multiply_
from mixle_core.runtime.groups import CONTROL, Mesh, Traffic, agree, counted_traffic, raise_everywhere, start_processes, together
from mixle_core.runtime.initialise import (
    Fill,
    derive_seed,
    equalise_copies,
    logical_parameters,
    mark_cut,
    place_parameters,
    recompute_units,
)
from mixle_core.runtime.models import Plugins
from mixle_core.runtime.optimizers import Factory
from mixle_core.runtime.probe import Probe

_SAME_ROWS = ("pp", "tp")
"""Ranks that differ only on these axes train on the same rows."""


class _LocalOwner:
    """Owner of parameters without a pending axis: the gradient is final where it was computed."""

    def __init__(self, transparent: tuple[str, ...]) -> None:
        self._transparent = transparent

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        bound = logical_parameters(model, self._transparent)
        self._rows = {row.name: (bound[row.name], 1.0 / row.copies) for row in rows}
        return model

    def no_sync(self) -> AbstractContextManager[Any]:
        return ExitStack()

    def finish(self, observe: Observe) -> OwnerReduction:
        gradients = {name: Gradient(parameter.grad, weight) for name, (parameter, weight) in self._rows.items()}
        return OwnerReduction(gradients, {name: 1 for name, gradient in gradients.items() if gradient.tensor is not None})

    def zero(self) -> None:
        for parameter, _ in self._rows.values():
            parameter.grad = None

    def close(self) -> None:
        self._rows = {}


def attach(
    model: nn.Module,
    plan: ParallelPlan,
    *,
    backend: str | Sequence[str] | None = None,
    seed: int = 0,
    plugins: Plugins = None,
    device: torch.device | str | None = None,
) -> Reduction:
    """Give every gradient of `model` its owner, on every rank, and return the handle of your own training loop.

    Collective: every rank calls it with the same arguments. Ranks that differ in plugins, plan, layout, trainable set or
    seed fail everywhere before the first gradient collective.

    Args:
        model: whole, unwrapped; parameters on meta are filled from (seed, logical name), others are made equal on copies.
        backend, plugins: as in `explain`.
        seed: of initial values and dropout.
        device: to train on; None takes this process's GPU where there is one, else the CPU.

    Raises:
        MixleError: whatever stands in the way, on every rank.
    """
    won: Arbitration | None = None
    failure: Exception | None = None
    document = None
    try:
        device = start_processes(plan, torch.device(device) if device is not None else None)
        won = arbitration(model, plan, backend, plugins)
        boundaries = {axis: {name: repr(module) for name, module in on.items()} for axis, on in won.layouts.modules.items()}
        extra = {"seed": seed, "torch": torch.__version__, "device": device.type, "executors": dict(won.table.executors)}
        # named to sort behind "parameters" and "table": where those differ too, they are the plainer words for it
        document = agreement_document(plan, won.plugins.versions, won.layouts, won.table, extra) | {"tensor_layouts": boundaries}
    except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
        failure = error
    agree(document, failure)
    assert won is not None and isinstance(device, torch.device)
    mesh = Mesh(plan, device)
    return _install(model, won, mesh, seed)


def ask_to_fill(plugins: LoadedPlugins) -> Fill:
    """Ask every plugin's `init_params`; two that fill one parameter are an error."""

    def fill(module: nn.Module, layouts: Layouts, seed: int) -> frozenset[str]:
        answers = plugins.ask("init_params", model=module, layouts=layouts, seed=seed)
        for who, names in answers:
            if not isinstance(names, (set, frozenset)):
                raise plugins.misanswered(who, "init_params", names, "a set of names or None")
        filled = exactly_one(
            sorted({name for _, names in answers for name in names}),
            [Bid(plugins.labels[who], names) for who, names in answers],
            what="one plugin fills a parameter",
            way_out={"nobody": "", "several": "leave one of them out of MIXLE_PLUGINS"},
        )
        return frozenset(filled)

    return fill


def _install(model: nn.Module, won: Arbitration, mesh: Mesh, seed: int) -> Reduction:
    executors: list[AxisExecutor] = [factory() for factory in dict.fromkeys(claim.executor for claim in won.executors.values())]

    def held(name: str) -> bool:
        return is_held(won.layouts.parameters[name].roles, mesh.position)

    def shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for executor in executors:
            tensor = executor.shard(won.layouts.parameters[name], tensor, mesh)
        return tensor

    with together(mesh):
        filled = place_parameters(model, won.layouts, seed, mesh.device, shard, ask_to_fill(won.plugins), held)
    equalise_copies(model, won.layouts, mesh, filled)
    # each step may make groups, for which all ranks are needed: one that fails is told to the others before the next
    for executor in executors:
        with together(mesh):
            executor.apply(model, won.layouts, mesh)
    with together(mesh):
        bound = logical_parameters(model, won.layouts.transparent)
        lost = [name for name in won.layouts.parameters if held(name) and name not in bound]
        if lost:
            raise PluginError(
                f"{lost[0]} is held by this rank, and its executor left no parameter of this name in the model ({len(lost)} such); a tied "
                "parameter keeps its first name wherever it lies"
            )
        mark_cut(model, tuple(won.executors))
        if mesh.plan.activation_checkpointing:
            recompute_units(model, won.layouts, mesh)
    module = model
    owners: dict[str, Owner] = {}
    for name, (claim, rows) in sorted(won.winners.items(), key=lambda item: (item[0] == LOCAL_OWNER, item[0])):
        with together(mesh):
            owners[name] = _LocalOwner(won.layouts.transparent) if name == LOCAL_OWNER else claim.owner()
            module = owners[name].install(module, tuple(row for row in rows if held(row.name)), mesh)
    data = {axis: mesh.coordinates[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp")}
    torch.manual_seed(derive_seed(seed, "dropout", *data.items()))  # equal on ranks that see the same activations
    return Reduction(model, module, won, mesh, owners, seed, _only_schedule(executors))


def _only_schedule(executors: Sequence[AxisExecutor]) -> Any:
    """The `run` of the executor that has one."""
    schedules = [executor.run for executor in executors if hasattr(executor, "run")]
    if len(schedules) > 1:
        raise CapabilityError("two executors bring a schedule of microbatches; way out: execute all axes with plugins of one backend")
    return schedules[0] if schedules else None


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
        model: the module that was passed, for its attributes and for evaluation without gradients.
        table: the ownership table.
        mesh: this rank's place in the plan.
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
        failure: Exception | None = self._changed() or self._finished_before() or _bad_number(max_norm, loss_scale)
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
            self.zero()
            self.require_same_rows(num_tokens, batch_digest)
        if self._probe is not None:
            try:
                self._probe.judge()
            except Exception:  # found alike on every rank; no gradient of it is left for another update
                self.zero()
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

    def zero(self) -> None:
        """Drop all gradients; the next update starts from nothing."""
        self._finished = False
        for owner in self._owners.values():
            owner.zero()

    def close(self) -> None:
        """Remove the hooks. The model keeps its values, cut as they are; process groups stay for the next attach."""
        for owner in reversed(list(self._owners.values())):
            owner.close()
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
        if self._probe is not None:
            self._probe.require(gradients.keys() - set(unused))
        return gradients

    def _raise_everywhere(self, failure: Exception | None) -> None:
        self.zero()
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

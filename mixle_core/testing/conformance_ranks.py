"""What the checks do on each rank. Every function takes where the suite's class is found again, and is called on all ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mixle_core.audit import VerifyReport, assemble, reference_model, relative_error, verify
from mixle_core.errors import AgreementError, LedgerError, MixleError
from mixle_core.ownership import AxisClaim
from mixle_core.plan import ParallelPlan
from mixle_core.runtime import Reduction, StateEntry, Traffic, attach, counted_traffic, load_state, logical_parameters, save_state
from mixle_core.runtime._upstream import gradient_hooks
from mixle_core.testing.conformance_rules import broken
from mixle_core.testing.conformance_subject import OWNS, Reference, Subject, items
from mixle_core.testing.pool import Outcome, run_ranks

CLIP = 0.05
"""Below the norm that small models have at their start, so that clipping does something."""

_EXIT = 77
"""How the rank ends that the others lose."""


def answers(reference: Reference) -> None:
    """Ask as `explain` does, in a process without a group."""
    ask(Subject.at(reference))


def ask(s: Subject) -> None:
    """See `answers`."""
    loaded = s.loaded
    plans = [*s.plans(), *(s.layout_plans() if "declare_layout" in s.hooks else ())]
    for plan in plans:
        model = s.build()
        try:
            layouts = s.layouts(plan, model, loaded)
            for hook in ("own_axis", "own_reduction"):
                loaded.ask_one(s.name, hook, model=model, plan=plan, layouts=layouts)
        except MixleError:
            pass  # what it says is for other checks
        except Exception as error:
            what = f"a hook raised {type(error).__name__}: {error}"
            broken(f"under {plan.describe()}, without a process group, {what}; hooks communicate with nobody")
        if dist.is_initialized():
            dist.destroy_process_group()
            broken(f"a hook made a process group under {plan.describe()}; it is asked before there is one, and communicates with nobody")


def _attach(s: Subject, plan: ParallelPlan, build: str = "build", seed: int = 0) -> Reduction:
    make = getattr(s, build)
    return attach(make(), plan, backend=s.suite.backend, seed=seed, plugins=s.plugins(plan, make())[0])


def prepares(reference: Reference, plan: ParallelPlan) -> str:
    """The digest of the table; an error of another kind than disagreement is for other checks."""
    s = Subject.at(reference)
    try:
        reduction = _attach(s, plan)
    except AgreementError as error:
        if "could not prepare" in str(error):
            raise
        broken(str(error))
    reduction.close()
    return reduction.table.digest


def starts_alike(reference: Reference, plan: ParallelPlan) -> None:
    """Compare what lies on the ranks with what one process starts with."""
    s = Subject.at(reference)
    reduction = _attach(s, plan)
    alone = logical_parameters(reference_model(s.build, 0, reduction), reduction.layouts.transparent)
    for name, (whole, equal) in _whole(reduction, dict(reduction.named_parameters())).items():
        error = relative_error(whole, alone[name].detach())
        if error > 0.0:
            broken(f"{plan.describe()}: {name} starts with other values than in one process (relative difference {error:.1e})")
        if not equal:
            broken(f"{plan.describe()}: {name} starts with different values on ranks that hold the same of it")
    reduction.close()


def _whole(reduction: Reduction, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, tuple[torch.Tensor | None, bool]]:
    mine = {name: None if tensor is None else _local(tensor) for name, tensor in tensors.items()}
    everyone = reduction.mesh.gather_objects(mine)
    return {row.name: assemble(reduction.mesh.plan, row, [theirs.get(row.name) for theirs in everyone]) for row in reduction.table.rows}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().cpu().clone()


def _data_rank(reduction: Reduction) -> int:
    plan, at = reduction.mesh.plan, reduction.mesh.coordinates
    return (at["dp_replicate"] * plan.dp_shard + at["dp_shard"]) * plan.cp + at["cp"]


def _update(s: Subject, reduction: Reduction, update: int, length: int, *, last: bool = True) -> Any:
    """One update without a step; its reduced gradients."""
    rows = [s.suite.batch(update, backward, _data_rank(reduction)) for backward in range(length)]
    loss_sum, tokens = reduction.run(rows, s.suite.loss, last=last)
    return reduction.finish(tokens, float(loss_sum))


def _forget(reduction: Reduction) -> None:
    """`zero`, and what it should have done."""
    reduction.zero()
    for _, parameter in reduction.named_parameters():
        parameter.grad = None


def reduces_once(reference: Reference, plan: ParallelPlan) -> None:
    """Four updates, of which two end early."""
    s = Subject.at(reference)
    reduction = _attach(s, plan)
    for update, (length, full) in enumerate(((2, True), (2, True), (1, False), (2, False))):
        try:
            _update(s, reduction, update, length, last=full)
        except LedgerError as error:
            broken(str(error))
        _forget(reduction)
    reduction.close()


def drops_gradients(reference: Reference, plan: ParallelPlan) -> None:
    """The same update before and after another one was given up."""
    s = Subject.at(reference)
    reduction = _attach(s, plan)
    first = _gradients(s, reduction)
    reduction.zero()
    left = [name for name, parameter in reduction.named_parameters() if parameter.grad is not None]
    if left:
        broken(f"{left[0]} has a gradient after zero() ({len(left)} such); the next update starts from nothing")
    with reduction.no_sync():
        value, _ = s.suite.loss(reduction.module, s.suite.batch(7, 0, _data_rank(reduction)))
        value.backward()
    reduction.zero()
    again = _gradients(s, reduction)
    for name, gradient in first.items():
        error = relative_error(again[name], gradient)
        if error > s.suite.tolerance:
            broken(f"{name} has another gradient after an update that was given up and dropped with zero() (off by {error:.1e})")
    reduction.zero()
    reduction.close()


def _gradients(s: Subject, reduction: Reduction) -> dict[str, torch.Tensor | None]:
    reduced = _update(s, reduction, 0, 1, last=False)
    return {name: None if gradient is None else _local(gradient) for name, gradient in reduced.gradients.items()}


def num_reductions(reference: Reference, plan: ParallelPlan) -> tuple[int, int]:
    """Reducing collectives of this plugin in an update of one backward and in one of four, once owners have settled."""
    s = Subject.at(reference)
    reduction = _attach(s, plan)
    owners = [owner for owner in reduction.table.owners if owner.partition("/")[0] == s.name]
    made = []
    for update, length in enumerate((1, 4, 1, 4)):
        before = _reductions(owners)
        _update(s, reduction, update, length)
        made.append(_reductions(owners) - before)
        reduction.zero()
    reduction.close()
    return made[2], made[3]


def _reductions(owners: Iterable[str]) -> int:
    """Collectives that reduce; those that gather parameters belong to every forward."""
    counted = {key: traffic for owner in owners for key, traffic in counted_traffic(f"mixle:{owner}:").items()}
    return sum((traffic for key, traffic in counted.items() if "reduce" in key.partition("|")[2]), Traffic()).num_collectives


def removes_hooks(reference: Reference, plan: ParallelPlan) -> None:
    """Compare with the same model when a double owned it: what executors leave is on both."""
    s = Subject.at(reference)
    reduction = _attach(s, plan)
    _update(s, reduction, 0, 1)
    reduction.zero()
    reduction.close()
    left = _hooks(reduction.model)
    usual = _hooks(s.build()) if not plan.executed_axes else _hooks_of_executors(s, plan)
    more = [name for name, number in left.items() if number > usual.get(name, 0)]
    if more:
        broken(
            f"close() left {left[more[0]] - usual.get(more[0], 0)} hooks on {more[0]} ({len(more)} such); it removes what install put there"
        )


def _hooks_of_executors(s: Subject, plan: ParallelPlan) -> dict[str, int]:
    """Hooks that remain when another owner was closed."""
    loaded = s.loaded_with_owner
    model = s.build()
    answers = loaded.ask("own_axis", model=model, plan=plan, layouts=s.layouts(plan, model, loaded))
    backends = [OWNS, *sorted({item.backend for _, answer in answers for item in items(answer) if isinstance(item, AxisClaim)})]
    try:
        other = attach(s.build(), plan, backend=backends, plugins=loaded)
    except MixleError:  # an executor and an owner that are one
        return {}
    other.close()
    return _hooks(other.model)


def _hooks(model: nn.Module) -> dict[str, int]:
    found = {}
    for name, module in model.named_modules():
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        found[f"module {name or 'at the root'}"] = sum(len(getattr(module, kind)) for kind in kinds)
    return found | {name: gradient_hooks(parameter) for name, parameter in model.named_parameters()}


def run_failing(reference: Reference, plan: ParallelPlan, limit_s: float) -> list[Outcome]:
    """Outcomes of the ranks whose last one ends within its second update."""
    patience = limit_s + 5.0  # for what comes before the failure
    outcomes = run_ranks(_fails, plan.world_size, reference, plan, check=False, timeout_s=patience, group_timeout_s=120.0)
    return [outcome for outcome in outcomes if outcome.exitcode != _EXIT]


def _fails(reference: Reference, plan: ParallelPlan) -> None:
    s = Subject.at(reference)
    reduction = _attach(s, plan)
    _update(s, reduction, 0, 1)
    reduction.zero()
    if reduction.mesh.rank == plan.world_size - 1:
        os._exit(_EXIT)
    _update(s, reduction, 1, 1)


def leaves_frozen_alone(reference: Reference, plan: ParallelPlan) -> None:
    """One update of the model with frozen parameters."""
    s = Subject.at(reference)
    reduction = _attach(s, plan, "build_frozen")
    frozen = {name: (p, _local(p)) for name, p in reduction.named_parameters() if not p.requires_grad}
    optimizer = reduction.build_optimizer(partial(torch.optim.SGD, lr=0.1))
    reduced = _update(s, reduction, 0, 2)
    given = sorted(frozen.keys() & reduced.gradients.keys())
    if given:
        broken(f"the owner handed over a gradient of {given[0]}, which is frozen")
    if optimizer is not None:
        optimizer.step()
    for name, (parameter, values) in frozen.items():
        if parameter.grad is not None:
            broken(f"{name} is frozen and has a gradient after an update")
        if not torch.equal(_local(parameter), values):
            broken(f"{name} is frozen and has other values after an update")
    reduction.close()


def against_one_process(reference: Reference, plan: ParallelPlan, build: str, batch: str) -> VerifyReport:
    """Three updates with accumulation, the second of which ends early, clipped."""
    s = Subject.at(reference)
    if plan.num_backwards == 1:
        plan = attrs.evolve(plan, gradient_accumulation_steps=3)
    make = getattr(s, build)
    return verify(
        make,
        plan,
        loss=s.suite.loss,
        batch=getattr(s.suite, batch),
        windows=(plan.num_backwards, 1, plan.num_backwards),
        max_grad_norm=CLIP,
        backend=s.suite.backend,
        plugins=s.plugins(plan, make())[0],
        # its epsilon is far above clipped gradients, so that a step is as exact as its gradient, also where that is near zero
        optimizer=partial(torch.optim.AdamW, lr=0.01, eps=1e-3),
    )


@attrs.frozen(eq=False)
class _Whole:
    """A reader of whole tensors."""

    tensors: Mapping[tuple[str, str], torch.Tensor]

    def kinds(self, name: str) -> list[str]:
        """The kinds that there are of a parameter."""
        return [kind for known, kind in self.tensors if known == name]

    def read(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """One block."""
        tensor = self.tensors[name, kind]
        for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor.clone()


def state_round_trips(reference: Reference, plan: ParallelPlan) -> None:
    """Save after an update, load into a new model whose values are others, and save again."""
    s = Subject.at(reference)
    reduction, optimizers = _optimized(s, plan, step=True)
    saved = _saved(reduction, optimizers)
    values = {name: whole for name, (whole, _) in _whole(reduction, dict(reduction.named_parameters())).items()}
    named = sorted({name for name, _ in saved})
    if not named:
        broken(f"save_state names nothing of make_model() under {plan.describe()}; let make_model() build a model whose state it holds")
    for name in named:
        if (name, "parameter") in saved and not torch.equal(saved[name, "parameter"], values[name]):  # type: ignore[arg-type]
            broken(f"save_state names other values of {name} than the ranks hold, put together")
    reduction.close()
    again, fresh = _optimized(s, plan, step=False)
    with torch.no_grad():
        for _, parameter in again.named_parameters():
            parameter.add_(1.0)
    loaded = set().union(*again.mesh.gather_objects(set(load_state(again, fresh, _Whole(saved)))))
    lost = sorted({*named} ^ loaded)
    if lost:
        broken(f"load_state {'did not name' if lost[0] in named else 'named'} {lost[0]} ({len(lost)} such); expected what save_state named")
    after = _saved(again, fresh)
    for name, kind in sorted({*saved, *after}):
        before, now = saved.get((name, kind)), after.get((name, kind))
        if before is None or now is None or not torch.equal(before, now):
            broken(f"{kind} of {name} is other after load_state than it was at save_state")
    again.close()


def _optimized(s: Subject, plan: ParallelPlan, *, step: bool) -> tuple[Reduction, dict[str, Any]]:
    reduction = _attach(s, plan, seed=0 if step else 1)
    optimizer = reduction.build_optimizer(partial(torch.optim.AdamW, lr=0.01))
    if step:
        _update(s, reduction, 0, 1)
        if optimizer is not None:
            optimizer.step()
        reduction.zero()
    return reduction, {} if optimizer is None else {"**": optimizer}


def _saved(reduction: Reduction, optimizers: Mapping[str, Any]) -> dict[tuple[str, str], torch.Tensor]:
    """(name, kind) -> the whole tensor, from the blocks of all ranks."""
    mine = [attrs.evolve(entry, tensor=entry.tensor.detach().cpu().clone()) for entry in save_state(reduction, optimizers)]
    whole: dict[tuple[str, str], torch.Tensor] = {}
    filled: dict[tuple[str, str], torch.Tensor] = {}
    for entry in _every(reduction, mine):
        key = entry.name, entry.kind
        target = whole.setdefault(key, torch.zeros(entry.shape, dtype=entry.tensor.dtype))
        covered = filled.setdefault(key, torch.zeros(entry.shape, dtype=torch.bool))
        if any(start + length > extent for start, length, extent in zip(entry.offset, entry.tensor.shape, entry.shape, strict=True)):
            broken(f"save_state names a block of {entry.name} at {list(entry.offset)} that reaches beyond its shape {list(entry.shape)}")
        place = tuple(slice(start, start + length) for start, length in zip(entry.offset, entry.tensor.shape, strict=True))
        target[place] = entry.tensor
        covered[place] = True
    holes = sorted(key for key, covered in filled.items() if not bool(covered.all()))
    if holes:
        name, kind = holes[0]
        broken(f"the blocks that save_state names of {name} ({kind}) leave a part of it out ({len(holes)} such)")
    return whole


def _every(reduction: Reduction, mine: Sequence[StateEntry]) -> Iterator[StateEntry]:
    for theirs in reduction.mesh.gather_objects(mine):
        yield from theirs

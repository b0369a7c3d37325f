"""`attach`: declare, arbitrate, agree, apply, initialise, install."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from mixle_core.errors import CapabilityError, PluginError
from mixle_core.layout import Layouts, is_held
from mixle_core.ownership import LOCAL_OWNER, Bid, Row, exactly_one
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import LoadedPlugins
from mixle_core.receipts import Gradient, OwnerReduction
from mixle_core.runtime.agreement import agreement_document
from mixle_core.runtime.arbitration import Arbitration, arbitration
from mixle_core.runtime.contracts import AxisExecutor, Observe, Owner
from mixle_core.runtime.groups import Mesh, agree, start_processes, together
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
from mixle_core.runtime.reduction import Reduction
from mixle_core.runtime.watch import Watch, require_announcing


class _LocalOwner:
    """Owner of parameters without a pending axis: the gradient is final where it was computed."""

    announces = True  # nothing is reduced

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
    strict: bool = False,
) -> Reduction:
    """Give every gradient of `model` its owner, on every rank, and return the handle of your own training loop.

    Collective: every rank calls it with the same arguments. Ranks that differ in plugins, plan, layout, trainable set or
    seed fail everywhere before the first gradient collective.

    Args:
        model: whole, unwrapped; parameters on meta are filled from (seed, logical name), others are made equal on copies.
        backend, plugins: as in `explain`.
        seed: of initial values and dropout.
        device: to train on; None takes this process's GPU where there is one, else the CPU.
        strict: compare every collective of every update with the table; one too many, too few, elsewhere, or beside the owner that
            writes over a gradient, and a gradient hook put on later, are errors at that update.

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
        extra = {"seed": seed, "torch": torch.__version__, "device": device.type, "executors": dict(won.table.executors), "strict": strict}
        # named to sort behind "parameters" and "table": where those differ too, they are the plainer words for it
        document = agreement_document(plan, won.plugins.versions, won.layouts, won.table, extra) | {"tensor_layouts": boundaries}
    except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
        failure = error
    agree(document, failure)
    assert won is not None and isinstance(device, torch.device)
    mesh = Mesh(plan, device, strict=strict)
    return _install(model, won, mesh, seed, strict=strict)


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


def _install(model: nn.Module, won: Arbitration, mesh: Mesh, seed: int, *, strict: bool) -> Reduction:
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
    if strict:
        with together(mesh):
            require_announcing(owners)
        mesh._start_watch(Watch(won.table, mesh.plan, mesh.rank, mesh.apart, logical_parameters(model, won.layouts.transparent)))
    torch.manual_seed(derive_seed(seed, "dropout", *data.items()))  # equal on ranks that see the same activations
    return Reduction(model, module, won, mesh, owners, seed, _only_schedule(executors))


def _only_schedule(executors: Sequence[AxisExecutor]) -> Any:
    """The `run` of the executor that has one."""
    schedules = [executor.run for executor in executors if hasattr(executor, "run")]
    if len(schedules) > 1:
        raise CapabilityError("two executors bring a schedule of microbatches; way out: execute all axes with plugins of one backend")
    return schedules[0] if schedules else None

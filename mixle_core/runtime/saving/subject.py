"""What is saved: an attached model, or any other, as this rank holds it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from mixle_core.errors import UsageError
from mixle_core.layout import logical_name
from mixle_core.ownership import describe_role
from mixle_core.plan import AXES
from mixle_core.runtime import state as entries
from mixle_core.runtime.reduction import Reduction
from mixle_core.runtime.saving.held import Held, held_by_module, held_by_reduction
from mixle_core.runtime.state import StateEntry, StateReader

Optimizers = Mapping[str, torch.optim.Optimizer]


@attrs.frozen(eq=False)
class Subject:
    """A model and where it lies.

    Args:
        held: parameters of this rank.
        everywhere: names that any rank holds.
        entries: what plugins name of the state, given the optimizers.
        load_entries: lets plugins read theirs; returns the names.
        facts: plain values that describe the model; alike on all ranks.
        geometry: ranks with equal ones hold the same.
        position: of this rank among those with other data.
    """

    model: nn.Module
    held: tuple[Held, ...]
    everywhere: Collection[str]
    entries: Callable[[Optimizers], tuple[StateEntry, ...]]
    load_entries: Callable[[Optimizers, StateReader], frozenset[str]]
    facts: Mapping[str, Any]
    geometry: Mapping[str, Any]
    versions: Mapping[str, str]
    transparent: tuple[str, ...]
    device: torch.device
    timeout_s: float
    seed: int
    position: Mapping[str, int]


def subject_of(model: Any, world_size: int, timeout_s: float, seed: int, data_rank: int | None) -> Subject:
    """An attached model by its table and layouts; any other by its DTensors.

    Raises:
        UsageError: neither.
    """
    if isinstance(model, Reduction):
        return _attached(model)
    if not isinstance(model, nn.Module):
        raise UsageError(f"a {type(model).__name__} as the model; expected a torch.nn.Module, or what attach returned")
    held = tuple(held_by_module(model))
    first = next((one.parameter for one in held), None)
    facts = {name: {"shape": list(one.shape), "dtype": str(one.parameter.dtype)} for name, one in ((one.name, one) for one in held)}
    return Subject(
        model=model,
        held=held,
        everywhere=[one.name for one in held],
        entries=lambda optimizers: (),
        load_entries=lambda optimizers, reader: frozenset(),
        facts={"parameters": facts},
        geometry={"world_size": world_size},
        versions={},
        transparent=(),
        device=first.device if first is not None else torch.device("cpu"),
        timeout_s=timeout_s,
        seed=seed,
        position={} if data_rank is None else {"data_rank": data_rank},  # nobody says which ranks draw alike, so all do
    )


def _attached(reduction: Reduction) -> Subject:
    plan, mesh, layouts = reduction.mesh.plan, reduction.mesh, reduction.layouts
    parameters = {
        name: {
            "shape": list(layout.shape),
            "dtype": layout.dtype,
            "trainable": layout.trainable,
            "aliases": list(layout.aliases),
            "roles": {axis: describe_role(role) for axis, role in layout.roles.items()},
        }
        for name, layout in layouts.parameters.items()
    }
    return Subject(
        model=reduction.model,
        held=tuple(held_by_reduction(reduction)),
        everywhere=list(layouts.parameters),
        entries=lambda optimizers: entries.save_state(reduction, optimizers),
        load_entries=lambda optimizers, reader: entries.load_state(reduction, optimizers, reader),
        facts={
            "plan": plan.as_dict(),
            "parameters": parameters,
            "owners": {row.name: row.owner for row in reduction.table.rows},
            "ownership digest": reduction.table.digest,
            "executors": dict(reduction.table.executors),
        },
        geometry={"world_size": plan.world_size, **{axis: plan.size(axis) for axis in (*AXES, "ep", "etp")}},
        versions={f"plugin {name}": version for name, version in dict(reduction.plugins.versions).items()},
        transparent=layouts.transparent,
        device=mesh.device,
        timeout_s=plan.timeout_s,
        seed=reduction.seed,
        position={axis: mesh.coordinates[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp")},
    )


def with_extra_state(subject: Subject) -> dict[str, tuple[nn.Module, Any]]:
    """Logical name -> module and its state that is neither parameter nor buffer, by torch's `get_extra_state`; None is none."""
    found = {}
    for raw, module in subject.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state = module.get_extra_state()
            if state is not None:
                found[logical_name(raw, subject.transparent)] = module, state
    return found


def as_mapping(optimizers: Any) -> Optimizers:
    """Pattern -> optimizer; a single one stands under `**`.

    Raises:
        UsageError: anything else.
    """
    found = {"**": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    if not isinstance(found, Mapping) or not all(isinstance(one, torch.optim.Optimizer) for one in found.values()):
        raise UsageError(f"a {type(optimizers).__name__} as the optimizer; expected a torch.optim.Optimizer, or name -> that")
    return found

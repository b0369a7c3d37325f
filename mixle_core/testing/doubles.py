"""Owners for tests that need one without installing a plugin."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mixle_core.hookspecs import hookimpl
from mixle_core.layout import Layouts
from mixle_core.ownership import Claim, Row
from mixle_core.plan import DATA_AXES, ParallelPlan
from mixle_core.receipts import Gradient, OwnerReduction
from mixle_core.runtime.contracts import Observe
from mixle_core.runtime.gradients import reduce_coalesced
from mixle_core.runtime.groups import Mesh
from mixle_core.runtime.initialise import logical_parameters
from mixle_core.runtime.usage import Usage


class SumOwner:
    """Sums all gradients over the row's axes at the end of the update, in one call per group."""

    announces = True

    def __init__(self, plan: ParallelPlan, transparent: tuple[str, ...]) -> None:
        self._plan = plan
        self._transparent = transparent

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Watch use; wrap nothing."""
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        bound = logical_parameters(model, self._transparent)
        self._parameters = {name: bound[name] for name in self._rows}
        names = {parameter: name for name, parameter in self._parameters.items()}
        self._usage = Usage(self._rows, self._plan)
        self._owner = rows[0].owner
        self._groups = {axes: mesh.group(axes, self._owner) for axes in sorted({row.reduced for row in rows})}
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(lambda p: self._usage.saw(names[p])) for p in self._parameters.values()
        ]
        self._handles.append(
            model.register_forward_pre_hook(lambda module, args: self._usage.next_forward() if torch.is_grad_enabled() else None)
        )
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing happens before `finish`."""
        return nullcontext()

    def finish(self, observe: Observe) -> OwnerReduction:
        """Reduce, and scale by the row's factor."""
        unused, missing = self._usage.settle(self._mesh)
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            if name in unused:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = parameter.grad
        observe(gradients)
        for axes, group in self._groups.items():
            mine = [name for name in gradients if self._rows[name].reduced == axes]
            said = self._mesh.announcer(self._owner, axes, mine)
            reduce_coalesced([gradients[name] for name in mine], group, announce=said)
            for name in mine:
                if self._rows[name].scale != 1.0:
                    gradients[name].mul_(self._rows[name].scale)
        return OwnerReduction(
            {name: Gradient(gradients.get(name), 1.0 / row.copies) for name, row in self._rows.items()},
            {name: 1 for name in gradients if name not in missing},
        )

    def zero(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._usage.discard()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class OwnsEverything:
    """A plugin, as an object to pass in code, that claims every trainable parameter over the data axes and tp."""

    def __init__(self, *, averages: bool = False, backend: str = "double") -> None:
        self.averages = averages
        self.backend = backend

    @hookimpl
    def own_reduction(self, plan: ParallelPlan, layouts: Layouts) -> Claim:
        """Claim everything, always."""
        return Claim(
            owner=lambda: SumOwner(plan, layouts.transparent),
            parameters=layouts.trainable,
            axes=frozenset({*DATA_AXES, "tp"}),
            backend=self.backend,
            averages=self.averages,
            whole=False,  # a slice on the only axis of a plan has nothing pending
        )

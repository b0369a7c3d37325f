"""The owner of a plan with tp alone: one coalesced sum over tp of the partial gradients, at the end of each update."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mixle_core import Gradient, OwnerReduction, ParallelPlan, Row
from mixle_core.runtime import Mesh, Observe, Usage, logical_parameters, reduce_coalesced


class TensorParallelOwner:
    """Leaves complete gradients alone (their copies are equal) and sums partial ones."""

    announces = True

    def __init__(self, plan: ParallelPlan, transparent: tuple[str, ...]) -> None:
        self._plan = plan
        self._transparent = transparent

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Watch which parameters are used; nothing is wrapped."""
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        bound = logical_parameters(model, self._transparent)
        self._parameters = {name: bound[name] for name in self._rows}
        names = {parameter: name for name, parameter in self._parameters.items()}
        self._usage = Usage(self._rows, self._plan)
        self._owner = rows[0].owner
        self._group = mesh.group(("tp",), self._owner)
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(lambda p: self._usage.saw(names[p])) for parameter in self._parameters.values()
        ]
        self._handles.append(
            model.register_forward_pre_hook(lambda module, args: self._usage.next_forward() if torch.is_grad_enabled() else None)
        )
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is reduced before `finish`."""
        return nullcontext()

    def finish(self, observe: Observe) -> OwnerReduction:
        """Sum the partial gradients over tp."""
        unused, missing = self._usage.settle(self._mesh)
        present = {name: parameter for name, parameter in self._parameters.items() if name not in unused}
        gradients: dict[str, torch.Tensor] = {}
        for name, parameter in present.items():
            if parameter.grad is None:  # used on another rank, or missing: the ledger tells the two apart
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = parameter.grad
        observe(gradients)
        summed = [name for name in gradients if self._rows[name].reduced]
        said = self._mesh.announcer(self._owner, ("tp",), summed)
        reduce_coalesced([gradients[name] for name in summed], self._group, announce=said)
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

"""What the core expects of the winners of a claim: the objects that reduce gradients and execute axes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from mixle_core.errors import UsageError
from mixle_core.layout import Layouts, ParameterLayout
from mixle_core.ownership import Row
from mixle_core.receipts import OwnerReduction
from mixle_core.runtime.groups import Mesh

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
"""Takes the module to call and one microbatch; returns the summed loss (a scalar) and the number of loss tokens."""

Observe = Callable[[Mapping[str, torch.Tensor]], None]
"""Takes logical name -> local gradient, before any reduction over a model axis; empty slices may be left out."""


def checked_loss(result: Any) -> tuple[torch.Tensor, int]:
    """What a loss returned, if it is a loss and a number of tokens; else UsageError."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise UsageError(f"loss returned a {type(result).__name__}; expected (summed loss, number of loss tokens)")
    loss, given = result
    try:
        count = operator.index(given)
    except TypeError:
        count = -1
    if count < 0:
        raise UsageError(f"loss returned {given!r} as the number of loss tokens; expected a whole number of at least 0")
    return loss, count


class Owner(Protocol):
    """Reduces the gradients of its rows over all their pending axes, once per update. Parameters are plain local tensors.

    One that leaves state sharded which a plain optimizer cannot step may have `build_optimizer(factory, names)`: an
    optimizer over the parameters of `names`, whose inner one `factory` makes, and whose `step()` does not clip.
    One with `announces = True` tells `Mesh.announce` of every reduction it makes, which strict mode needs.
    """

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Wrap or hook `model`; return the module to call. Rows keep their logical names; parameter objects may change.

        Args:
            rows: those that this rank holds.
        """

    def no_sync(self) -> AbstractContextManager[Any]:
        """Context around forward and backward of every microbatch but the last of an update."""

    def finish(self, observe: Observe) -> OwnerReduction:
        """Wait for the reductions of this update, make those that are missing, and hand the gradients over.

        Exact also when the last backward ran inside `no_sync()`. Calls `observe` with the gradients of the rows that are
        replicas on a model axis, before reducing over that axis.
        """

    def zero(self) -> None:
        """Drop the gradients, so that the next update starts from nothing."""

    def close(self) -> None:
        """Remove what `install` put on the model."""


class AxisExecutor(Protocol):
    """Executes one model axis: cuts the parameters and installs the forward and backward boundaries.

    One object executes all axes that a plugin claims with one factory. One that cuts the model into stages also has
    `run(module, microbatches, forward, loss_scale)`: its schedule of one batch. It calls `forward(module, microbatch)` for
    each microbatch, in order, on every rank whose part computes the loss, backpropagates `loss_scale` times the scalar that
    this returns where gradients are enabled, and returns nothing. Whatever else it adds to the loss is scaled alike. Where
    the part has no loss, what `module` returns is the end of the part: the executor takes it there.
    """

    def shard(self, layout: ParameterLayout, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """This rank's slice of `tensor` (global shape on this axis); `tensor` itself where the axis does not cut it."""

    def apply(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        """Install the boundaries that `layouts.modules` declares; parameters are already cut.

        Parameters that this rank does not hold (`Replica(ranks=...)`) are empty, and are to be removed from `model`. One that is tied
        across stages keeps its first name wherever it lies: owners find parameters by it.
        """

"""What the core expects of the winners of a claim: the objects that reduce gradients and execute axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from mixle_core.layout import Layouts, ParameterLayout
from mixle_core.ownership import Row
from mixle_core.receipts import OwnerReduction
from mixle_core.runtime.groups import Mesh

Observe = Callable[[Mapping[str, torch.Tensor]], None]
"""Takes logical name -> local gradient, before any reduction over a model axis; empty slices may be left out."""


class Owner(Protocol):
    """Reduces the gradients of its rows over all their pending axes, once per update. Parameters are plain local tensors."""

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Wrap or hook `model`; return the module to call. Rows keep their logical names; parameter objects may change."""

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
    """Executes one model axis: cuts the parameters and installs the forward and backward boundaries."""

    def shard(self, layout: ParameterLayout, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """This rank's slice of `tensor` (global shape on this axis); `tensor` itself where the axis does not cut it."""

    def apply(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        """Install the boundaries that `layouts.modules` declares; parameters are already cut."""

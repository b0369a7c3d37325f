"""A plugin author's and a user's code, for the type checker only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

import mixle_core as mx
from mixle_core.runtime import AxisExecutor, Mesh, Observe, Owner, reduce_coalesced
from mixle_core.testing import PluginConformance, check


@mx.hookimpl
def declare_layout(model: Any, plan: mx.ParallelPlan, declared: Mapping[str, Mapping[str, mx.Role]]) -> mx.ModelLayout | None:
    """Declare a two-layer model."""
    if declared or not isinstance(model, nn.Sequential):
        return None
    enter = mx.Boundary(outside=mx.Replica(), inside=mx.Replica("partial"))
    leave = mx.Boundary(outside=mx.Replica(), inside=mx.Term())
    up = mx.ModuleLayout(parameters={"{weight,bias}": mx.Shard(0)}, inputs={0: enter})
    down = mx.ModuleLayout(parameters={"weight": mx.Shard(1), "bias": mx.Replica("partial")}, output=leave, once=["bias"])
    return mx.ModelLayout(axis="tp", modules={"0": up, "1": down}, units=["*"])


class MyOwner:
    """An owner that sums at the end."""

    def install(self, model: nn.Module, rows: tuple[mx.Row, ...], mesh: Mesh) -> nn.Module:
        """Keep the parameters."""
        self.rows, self.mesh = rows, mesh
        self.parameters = dict(model.named_parameters())
        return model

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to hold back."""
        return nullcontext()

    def finish(self, observe: Observe) -> mx.OwnerReduction:
        """Sum over each row's axes."""
        gradients: dict[str, mx.Gradient] = {}
        for row in self.rows:
            gradient = self.parameters[row.name].grad
            if gradient is not None:
                observe({row.name: gradient})
                reduce_coalesced([gradient], self.mesh.group(row.reduced, row.owner))
            gradients[row.name] = mx.Gradient(gradient, 1.0 / row.copies)
        return mx.OwnerReduction(gradients, {name: 1 for name, gradient in gradients.items() if gradient.tensor is not None})

    def zero(self) -> None:
        """Drop the gradients."""

    def close(self) -> None:
        """Nothing was installed."""


class MyExecutor:
    """An executor that cuts nothing."""

    def shard(self, layout: mx.ParameterLayout, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """The tensor as it is."""
        return tensor

    def apply(self, model: nn.Module, layouts: mx.Layouts, mesh: Mesh) -> None:
        """No boundary."""


@mx.hookimpl
def own_reduction(plan: mx.ParallelPlan, layouts: mx.Layouts) -> mx.Claim | mx.Refusal:
    """Claim everything on dp_replicate."""
    if plan.dp_shard > 1:
        return mx.Refusal("parameters are sharded", "set dp_shard=1")
    return mx.Claim(owner=MyOwner, parameters=layouts.trainable, axes=["dp_replicate"], backend="mine")


owner: Owner = MyOwner()
executor: AxisExecutor = MyExecutor()


def use(model: nn.Module) -> float:
    """The three doors."""
    plan = mx.ParallelPlan(dp_shard=2, tp=2)
    table: mx.OwnershipTable = mx.explain(model, plan)
    reduction: mx.Reduction = mx.attach(model, plan, backend=["mine", "torch_native"], seed=1)
    reduced = reduction.finish(table.rows[0].copies)
    clipped: float = reduced.clip_(1.0)

    def loss(module: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        out: torch.Tensor = module(batch)
        return out.sum(), out.numel()

    session: mx.Session = mx.prepare(model, plan, loss=loss, optimizer={"**": partial(torch.optim.SGD, lr=0.1)}, max_grad_norm=1.0)
    receipt: mx.StepReceipt = session.train_batch(torch.ones(2, 2))
    return clipped + receipt.loss


class TestMyPlugin(PluginConformance):
    """A plugin author's tests."""

    plugin_name = "mine"
    beside = ("theirs",)
    plans = (mx.ParallelPlan(), mx.ParallelPlan(tp=2))
    sizes: ClassVar = {"tp": (2, 4)}
    unsupported: ClassVar = {"tied_parameters": "it has none"}

    def make_model(self) -> nn.Module:
        """A small one."""
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def batch(self, update: int, backward: int, data_rank: int) -> torch.Tensor:
        """Rows."""
        return torch.ones(2, 4)

    @check(since="0.1", needs=["discovered"])
    def test_of_mine(self) -> None:
        """A check of its own."""
        assert self.plugin_name

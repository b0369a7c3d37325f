"""Replicas of a model axis: partial gradients are summed jointly over both axes in one call, complete ones over the data axis."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mixle_core import AxisClaim, ModelLayout, ModuleLayout, ParallelPlan, Replica, hookimpl
from mixle_core.audit import verify

DDP2_TP2 = ParallelPlan(dp_replicate=2, tp=2, gradient_accumulation_steps=2)


class Sum(torch.autograd.Function):
    """Sum over the tp ranks; each computed one term, so the gradient passes."""

    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Model(nn.Module):
    """`mixed` and `scale`, of the model itself, are used in parts, each tp rank with its own columns; `whole` by every tp rank alike."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(8, 4, bias=False)
        self.whole = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.arange(1.0, 9.0))
        self.mesh = None

    def forward(self, values):
        if self.mesh is None:
            return self.whole(self.mixed(values * self.scale))
        mine = torch.zeros(8)
        mine[self.mesh.coordinates["tp"] * 4 :][:4] = 1.0
        return self.whole(Sum.apply(self.mixed(values * self.scale * mine), self.mesh.group(("tp",), "double")))


class Executor:
    def shard(self, layout, tensor, mesh):
        return tensor

    def apply(self, model, layouts, mesh):
        model.mesh = mesh


class Columns:
    """Layout and executor of the model's tp axis."""

    @hookimpl
    def declare_layout(self, model, plan):
        modules = {
            "": ModuleLayout(parameters={"scale": Replica("partial")}),
            "mixed": ModuleLayout(parameters={"weight": Replica("partial")}),
            "whole": ModuleLayout(parameters={"{weight,bias}": Replica("complete")}),
        }
        return ModelLayout(axis="tp", modules=modules)

    @hookimpl
    def own_axis(self, plan, layouts):
        return AxisClaim(axis="tp", executor=Executor, backend="double")


def build(trained):
    torch.manual_seed(0)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    return model


def squares(module, batch):
    return module(batch).square().sum(), batch.shape[0]


def rows(update, backward, data_rank):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * update + 10 * backward + data_rank))


KINDS = {"both": ("mixed", "scale", "whole"), "partial": ("mixed", "scale"), "complete": ("whole",)}


def cell(trained, plan):
    return verify(
        lambda: build(trained), plan, loss=squares, batch=rows, windows=[2, 1, 2], plugins={"columns": Columns()}, max_grad_norm=0.5
    )


def cells():
    reports = {kind: cell(trained, DDP2_TP2) for kind, trained in KINDS.items()}
    return reports | {"may vary": cell(KINDS["both"], attrs.evolve(DDP2_TP2, unused_parameters=True))}


def test_each_kind_is_summed_over_its_axes_and_no_further(ranks):
    reports = ranks(cells, 4)[0].value
    assert {kind: report for kind, report in reports.items() if not report.passed(1e-5)} == {}
    for kind, calls, numel in (("both", 2, 40 + 20), ("partial", 1, 40), ("complete", 1, 20), ("may vary", 2, 40 + 20)):
        assert reports[kind].collectives == {"torch-ddp": calls}, kind
        assert reports[kind].payload_bytes == {"torch-ddp": 4 * numel}, kind

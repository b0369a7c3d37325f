"""Plugins that keep every rule, one of each kind, and their suites. Other files break one thing of them."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.runtime import StateEntry, named_modules
from mixle_core.testing import OwnsEverything, PluginConformance, SumOwner

WHOLE, SHARED, TERM = mx.Replica("complete"), mx.Replica("partial"), mx.Term()
Plan = mx.ParallelPlan


class Scale(nn.Module):
    """One factor for each feature, which only a hook fills."""

    def __init__(self, features=8):
        super().__init__()
        self.factor = nn.Parameter(torch.empty(features))

    def forward(self, rows):
        return rows * self.factor


class Net(nn.Module):
    """A norm and a scale, which are whole on tp, and two matrices, which are cut."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = Scale()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.last = nn.Linear(8, 8)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, rows):
        hidden = self.first(rows)
        hidden = hidden + self.down(nn.functional.gelu(self.up(self.scale(self.norm(hidden)))))
        return self.last(hidden)


def net(*, tied=False):
    with torch.device("meta"):
        return Net(tied=tied)


class Layout:
    """A good layout of a Net."""

    def modules(self, model, plan):
        return {
            "{norm,first,last}": mx.ModuleLayout(parameters={"{weight,bias}": WHOLE}),
            "scale": mx.ModuleLayout(parameters={"factor": WHOLE}),
            "up": mx.ModuleLayout(parameters={"{weight,bias}": mx.Shard(0)}, inputs={0: mx.Boundary(outside=WHOLE, inside=SHARED)}),
            "down": mx.ModuleLayout(
                parameters={"weight": mx.Shard(1), "bias": SHARED}, output=mx.Boundary(outside=WHOLE, inside=TERM), once=("bias",)
            ),
        }

    @mx.hookimpl
    def declare_layout(self, model, plan):
        return mx.ModelLayout(axis="tp", modules=self.modules(model, plan)) if isinstance(model, Net) else None

    def values(self, shape, seed):
        return torch.randn(shape)

    @mx.hookimpl
    def init_params(self, model, layouts, seed):
        if not isinstance(model, Scale):
            return None
        model.factor.copy_(self.values(model.factor.shape, seed))
        return frozenset(layouts.parameters)

    @mx.hookimpl
    def build_model(self, spec):
        if spec != "small":
            raise mx.UsageError(f"net:{spec}: expected net:small")
        return net()


class Enter(torch.autograd.Function):
    """Nothing in the forward, a sum in the backward."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Leave(torch.autograd.Function):
    """A sum in the forward, nothing in the backward."""

    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Columns:
    """Executes the layout of a Net."""

    def place(self, mesh):
        return mesh.coordinates["tp"]

    def shard(self, layout, tensor, mesh):
        role = layout.roles["tp"]
        return tensor.chunk(mesh.plan.tp, role.dim)[self.place(mesh)].contiguous() if isinstance(role, mx.Shard) else tensor

    def apply(self, model, layouts, mesh):
        group, first = mesh.group(("tp",), "net.forward"), mesh.coordinates["tp"] == 0
        modules = named_modules(model, layouts.transparent)
        modules["up"].register_forward_pre_hook(lambda module, args: Enter.apply(args[0], group))
        down = modules["down"]
        down.forward = lambda rows: Leave.apply(nn.functional.linear(rows, down.weight, down.bias * float(first)), group)


class Executor:
    """A good executor of tp."""

    columns = Columns

    @mx.hookimpl
    def own_axis(self, plan):
        return mx.AxisClaim(axis="tp", executor=self.columns, backend="double") if plan.tp > 1 else None


class Owner:
    """A good owner of everything."""

    kind = SumOwner

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        owner = partial(self.kind, plan, layouts.transparent)
        return mx.Claim(owner=owner, parameters=layouts.trainable, axes={"dp_replicate", "dp_shard", "tp"}, backend="double", whole=False)


class State(Owner):
    """An owner that saves the state of what it owns; nothing is cut."""

    @mx.hookimpl
    def save_state(self, model, optimizers, ownership):
        found = []
        parameters = dict(model.named_parameters())
        for row in ownership.rows:
            parameter = parameters[row.name]
            held = {"parameter": parameter.detach(), **optimizers["**"].state.get(parameter, {})}
            for kind, tensor in held.items():
                shape = tuple(tensor.shape)
                found.append(StateEntry(row.name, kind, shape, (0,) * len(shape), tensor))
        return tuple(found)

    def kinds(self, reader, name):
        return reader.kinds(name)

    @mx.hookimpl
    def load_state(self, model, optimizers, ownership, reader):
        parameters = dict(model.named_parameters())
        for row in ownership.rows:
            parameter = parameters[row.name]
            for kind in self.kinds(reader, row.name):
                shape = () if kind == "step" else row.shape
                values = reader.read(row.name, kind, (0,) * len(shape), shape)
                if kind == "parameter":
                    parameter.data.copy_(values)
                else:
                    optimizers["**"].state[parameter][kind] = values
        return frozenset(row.name for row in ownership.rows)


class Everything(Layout, Executor, Owner):
    """Layout, executor and owner in one."""


class NetSuite(PluginConformance):
    """A layout, executed by the good executor on two processes."""

    plugin_name = "net"
    plugin = Layout()
    extra: ClassVar = {"columns": Executor()}
    plans = (Plan(tp=2),)

    def make_model(self):
        return net()

    def make_tied_model(self):
        return net(tied=True)


class LayoutSuite(NetSuite):
    """The good layout under the default plans."""

    plans = None


class EverythingSuite(NetSuite):
    """All in one, without help."""

    plugin = Everything()
    extra: ClassVar = {}


class ExecutorSuite(NetSuite):
    """The good executor, with the good layout beside it."""

    plugin_name = "columns"
    plugin = Executor()
    extra: ClassVar = {"net": Layout()}


class DoubleSuite(PluginConformance):
    """The double of the testing kit, under the default plans."""

    plugin = OwnsEverything()


class OwnerSuite(PluginConformance):
    """A good owner."""

    plugin_name = "owner"
    plugin = Owner()
    plans = (Plan(dp_replicate=2),)


class Refuses:
    """A plugin that will own one day."""

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        return mx.Refusal("nothing is measured yet", "choose another backend")


NEVER = {"plans_reach_the_plugin": "it refuses every plan"}


class RefusingSuite(PluginConformance):
    """Refusals only."""

    plugin_name = "refuses"
    plugin = Refuses()
    plans = ()
    unsupported = NEVER


class StateSuite(OwnerSuite):
    """An owner that saves state."""

    plugin = State()

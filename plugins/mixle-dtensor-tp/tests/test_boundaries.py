"""Boundaries meet the forward as it is called: by position or keyword, with tuples; what does not fit is one line on every rank."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from torch import nn

from mixle_core import Boundary, ModelLayout, ModuleLayout, ParallelPlan, Replica, Shard, Term, attach, hookimpl
from mixle_core.audit import reference_model, relative_error
from mixle_core.testing import ToyLayout, run_ranks, token_batch, toy_model

WHOLE, PARTIAL = Replica("complete"), Replica("partial")
ENTER = Boundary(outside=WHOLE, inside=PARTIAL)
ENV = {"MIXLE_PLUGINS": "dtensor-tp"}


class Pair(NamedTuple):
    values: torch.Tensor
    note: str


CALLS = {
    "by-position": lambda mlp, hidden, context: mlp(hidden, context),
    "by-keyword": lambda mlp, hidden, context: mlp(context=context, hidden=hidden),
    "mixed": lambda mlp, hidden, context: mlp(hidden, context=context),
    "one-left-out": lambda mlp, hidden, context: mlp(hidden),
    "no-tensor": lambda mlp, hidden, context: mlp(hidden, context="context"),
}
RETURNS = {
    "tensor": lambda values: values,
    "tuple": lambda values: (values, "note"),
    "list": lambda values: [values, None],
    "named-tuple": lambda values: Pair(values, "note"),
    "dict": lambda values: {"values": values},
    "nothing": lambda values: None,
    "empty-tuple": lambda values: (),
    "text-first": lambda values: ("note", values),
}
DECLARED = {"positions": (0, 1), "keywords": ("hidden", "context"), "both": (0, "context")}


class Mlp(nn.Module):
    """Two inputs that both carry a gradient; returns what the case says."""

    def __init__(self, returns):
        super().__init__()
        self.returns = returns
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden, context=None):
        gate = 1.0 if context is None else self.right(context) if isinstance(context, torch.Tensor) else 2.0
        return RETURNS[self.returns](self.down(torch.tanh(self.left(hidden)) * gate))


class Model(nn.Module):
    """Two whole layers whose gradients are right only if both inputs pass their boundary."""

    def __init__(self, call, returns):
        super().__init__()
        self.call = call
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mlp = Mlp(returns)

    def forward(self, values):
        output = CALLS[self.call](self.mlp, self.first(values), self.second(values))
        if isinstance(output, torch.Tensor):
            return output
        return output if output is None or not output else next(iter(output.values())) if isinstance(output, dict) else output[0]


class Layout:
    """A layout plugin for Model; `wrapped` puts further work around the forward, whose signature has to survive it."""

    def __init__(self, keys, wrapped):
        self.keys, self.wrapped = keys, wrapped

    @hookimpl
    def declare_layout(self, model, plan):
        roles = {"{left,right}.{weight,bias}": Shard(0), "down.weight": Shard(1), "down.bias": PARTIAL}
        mlp = ModuleLayout(
            parameters=roles,
            inputs=dict.fromkeys(self.keys, ENTER),
            output=Boundary(outside=WHOLE, inside=Term()),
            once=("down.bias",),
            sharded_dropout=self.wrapped,
        )
        return ModelLayout(axis="tp", modules={"mlp": mlp, "{first,second}": ModuleLayout(parameters={"{weight,bias}": WHOLE})})


def on_meta(call, returns):
    with torch.device("meta"):
        return Model(call, returns)


def worst_error(keys, wrapped, call, returns):
    """Of the output and of all gradients, against one process."""
    build = functools.partial(on_meta, call, returns)
    reduction = attach(build(), ParallelPlan(tp=2), plugins={"layout": Layout(keys, wrapped)}, seed=1)
    reference = reference_model(build, 1)
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    output, wanted = reduction.module(values), reference(values)
    output.square().sum().backward()
    wanted.square().sum().backward()
    errors = [relative_error(output.detach(), wanted.detach())]
    for name, gradient in reduction.finish(6).gradients.items():
        whole, role = reference.get_parameter(name).grad / 6, reduction.layouts.parameters[name].roles["tp"]
        cut = whole.chunk(2, role.dim)[reduction.mesh.rank] if isinstance(role, Shard) else whole
        errors.append(relative_error(gradient, cut))
    return max(errors)


CASES = [
    *itertools.product(DECLARED, [False, True], ["by-position", "by-keyword", "mixed"], ["tensor"]),
    *itertools.product(["positions"], [False], ["mixed"], ["tuple", "list", "named-tuple"]),
]


def all_cases_on_rank():
    return {case: worst_error(DECLARED[case[0]], *case[1:]) for case in CASES}


@functools.cache
def errors():
    return [outcome.value for outcome in run_ranks(all_cases_on_rank, 2, env=ENV, timeout_s=60)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_declared_inputs_and_outputs_are_found_however_they_are_passed(case):
    assert all(of_rank[case] <= 1e-5 for of_rank in errors()), [of_rank[case] for of_rank in errors()]


def fails_on_rank(keys, call, returns):
    worst_error(keys, False, call, returns)


def message_on_every_rank(function, world_size, *args):
    outcomes = run_ranks(function, world_size, *args, env=ENV, timeout_s=30, check=False)
    assert {outcome.error for outcome in outcomes} == {"UsageError"}, outcomes
    (message,) = {outcome.message for outcome in outcomes}
    return message


@pytest.mark.parametrize(
    ("keys", "said"), [((0, 1), "'context'"), ((0, "context"), "'context'"), ((0, "elsewhere"), "'elsewhere'"), ((0, 7), "7")]
)
def test_a_declared_input_that_is_missing_is_named(keys, said):
    call = "one-left-out" if said == "'context'" else "by-position"
    assert message_on_every_rank(fails_on_rank, 2, keys, call, "tensor") == f"mlp was called without its declared input {said}"


def test_a_declared_input_that_is_no_tensor_is_named():
    message = message_on_every_rank(fails_on_rank, 2, (0, 1), "no-tensor", "tensor")
    assert message == "mlp was called with a str as its declared input 'context'; expected a tensor"


WITHOUT_TENSOR = {"dict": "dict", "nothing": "NoneType", "empty-tuple": "tuple", "text-first": "tuple"}


@pytest.mark.parametrize(("returns", "kind"), WITHOUT_TENSOR.items())
def test_an_output_without_a_tensor_in_its_place_is_named(returns, kind):
    message = message_on_every_rank(fails_on_rank, 2, (0, 1), "mixed", returns)
    assert message == f"mlp returned {kind}: its declared output is a tensor, or a tuple that starts with one"


def toy_on_rank(tp, length):
    plan = ParallelPlan(tp=tp, sequence_parallel=True)
    attach(toy_model(), plan, plugins={"toy": ToyLayout()}).module(token_batch(0, 0, 0, length=length))


@pytest.mark.parametrize(("tp", "length"), [(2, 7), (4, 6)])
def test_a_sequence_that_tp_does_not_divide_is_one_clear_line(tp, length):
    assert message_on_every_rank(toy_on_rank, tp, tp, length) == (
        f"an activation of shape [2, {length}, 16] is cut along dim 1, whose length {length} is not divisible by tp={tp}; "
        f"pad the batch to a multiple of {tp}"
    )

"""Weights that every rank holds but uses on its own tokens or heads are summed exactly once, whatever they are called."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixle_core import Boundary, ModelLayout, ModuleLayout, ParallelPlan, Replica, Shard, Term, explain, hookimpl, load_plugins
from mixle_core.audit import verify
from mixle_core.testing import run_ranks

WHOLE, PARTIAL, TOKENS = Replica("complete"), Replica("partial"), Shard(0)
ENV = {"MIXLE_PLUGINS": "dtensor-tp"}
PLAN = ParallelPlan(tp=2)


class Declares:
    """A layout plugin that says the same of every model."""

    def __init__(self, modules):
        self.modules = modules

    @hookimpl
    def declare_layout(self, model, plan):
        return ModelLayout(axis="tp", modules=self.modules)


class Gate(nn.Module):
    """A router: every rank scores its own tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)

    def forward(self, tokens):
        return self.router(tokens).softmax(-1)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

    def forward(self, tokens):
        return self.gate(tokens)


def routed(role):
    own_tokens = Boundary(outside=WHOLE, inside=TOKENS)
    return {"gate": ModuleLayout(parameters={"router.weight": role}, inputs={0: own_tokens}, output=own_tokens)}


class LowRank(nn.Module):
    """A matrix with a low-rank factor pair beside it."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, values):
        return self.base(values) + self.b(self.a(values))


class Adapted(nn.Module):
    """A column layer and a row layer, both adapted, with the tokens cut outside of them."""

    def __init__(self):
        super().__init__()
        self.column, self.row = LowRank(), LowRank()

    def forward(self, tokens):
        return self.row(torch.tanh(self.column(tokens)))


ADAPTED = {
    "": ModuleLayout(inputs={0: Boundary(outside=WHOLE, inside=TOKENS)}, output=Boundary(outside=WHOLE, inside=TOKENS)),
    "column.{base,b}": ModuleLayout(parameters={"weight": Shard(0)}, inputs={0: Boundary(outside=TOKENS, inside=PARTIAL)}),
    "row.{base,a}": ModuleLayout(parameters={"weight": Shard(1)}, output=Boundary(outside=TOKENS, inside=Term())),
    "column.a": ModuleLayout(parameters={"weight": PARTIAL}),
    "row.b": ModuleLayout(parameters={"weight": PARTIAL}),
}


class HeadwiseNorm(nn.Module):
    """Normalises each local head; its weight has an entry for every element of every head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16))

    def reset_parameters(self):
        nn.init.normal_(self.weight, mean=1.0, std=0.2)

    def forward(self, heads):
        return F.rms_norm(heads, (4,)) * self.weight.view(-1, 4)


class Norms(nn.Module):
    """Four heads of four, normalised by weights that all heads share, and by one that is cut with the heads."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.q_layernorm, self.q_norm, self.out_norm = (nn.RMSNorm(4) for _ in range(3))
        self.gated_norm = HeadwiseNorm()

    def forward(self, tokens):
        heads = self.up(tokens).unflatten(-1, (-1, 4))
        heads = self.out_norm(heads.tanh() + self.q_norm(heads) * self.q_layernorm(heads.sigmoid()))
        return self.down(self.gated_norm(heads + heads.square()).flatten(-2))


NORMS = {
    "up": ModuleLayout(parameters={"{weight,bias}": Shard(0, unit=4)}, inputs={0: Boundary(outside=WHOLE, inside=PARTIAL)}),
    "{q_layernorm,q_norm,out_norm}": ModuleLayout(parameters={"weight": PARTIAL}),
    "gated_norm": ModuleLayout(parameters={"weight": Shard(0, unit=4)}),
    "down": ModuleLayout(parameters={"weight": Shard(1, unit=4)}, output=Boundary(outside=WHOLE, inside=Term())),
}

CASES = {
    "router": (Routed, routed(PARTIAL), {"gate.router.weight"}),
    "router-declared-complete": (Routed, routed(WHOLE), set()),
    "low-rank-factors": (Adapted, ADAPTED, {"column.a.weight", "row.b.weight"}),
    "norms-of-heads": (Norms, NORMS, {"q_layernorm.weight", "q_norm.weight", "out_norm.weight"}),
}


def on_meta(name):
    with torch.device("meta"):
        return CASES[name][0]()


def drawn(update, backward, data_rank):
    """Twelve tokens of width 8 and what their outputs are multiplied with."""
    generator = torch.Generator().manual_seed(update * 10 + backward)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)


def weighted_sum(module, batch):
    tokens, values = batch
    output = module(tokens)
    return (output * values[:, : output.shape[1]]).sum(), len(tokens)


def verify_on_rank(name, plan):
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    plugins = {"layout": Declares(CASES[name][1])}
    return verify(functools.partial(on_meta, name), plan, loss=weighted_sum, batch=drawn, plugins=plugins, optimizer=optimizer)


@pytest.mark.parametrize(("name", "steps"), [("router", 1), ("low-rank-factors", 1), ("low-rank-factors", 2), ("norms-of-heads", 2)])
def test_partial_replicas_equal_one_process_after_three_steps_of_sgd(name, steps):
    plan = ParallelPlan(tp=2, gradient_accumulation_steps=steps)
    for outcome in run_ranks(verify_on_rank, 2, name, plan, env=ENV, timeout_s=60):
        assert outcome.value.passed(1e-5), outcome.value
        assert outcome.value.collectives["dtensor-tp"] == 1


@pytest.mark.parametrize("name", ["router", "low-rank-factors", "norms-of-heads"])
def test_exactly_the_partial_replicas_are_summed(name):
    plugins = load_plugins(["dtensor-tp"], extra={"layout": Declares(CASES[name][1])})
    table = explain(on_meta(name), PLAN, plugins=plugins)
    assert {row.name for row in table.rows if row.operation == "sum"} == CASES[name][2]
    assert all(row.reduced == ("tp",) and row.scale == 1.0 for row in table.rows if row.operation == "sum")


def test_a_router_of_own_tokens_declared_complete_is_an_error_on_every_rank_at_the_first_update():
    outcomes = run_ranks(verify_on_rank, 2, "router-declared-complete", PLAN, env=ENV, timeout_s=60, check=False)
    assert [outcome.error for outcome in outcomes] == ["DeclarationError"] * 2
    assert all("gate.router.weight on tp: declared Replica(complete), but the ranks' gradients differ" in o.message for o in outcomes)

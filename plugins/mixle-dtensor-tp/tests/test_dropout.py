"""Dropout: equal masks on activations that all ranks hold, own masks on slices, and the same ones again in a recomputation."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from mixle_core import Boundary, ModelLayout, ModuleLayout, ParallelPlan, Replica, Shard, Term, attach, hookimpl
from mixle_core.audit import reference_model, relative_error
from mixle_core.testing import OwnsEverything, run_ranks

WHOLE, PARTIAL = Replica("complete"), Replica("partial")
ENV = {"MIXLE_PLUGINS": "dtensor-tp"}


class RecordedDropout(nn.Dropout):
    """Remembers what it multiplied with at every forward."""

    def __init__(self):
        super().__init__(0.5)
        self.factors = []

    def forward(self, values):
        factors = super().forward(torch.ones_like(values))
        self.factors.append(factors)
        return values * factors


class Block(nn.Module):
    """Dropout before the column layer on whole activations, and after it on this rank's hidden units."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = RecordedDropout(), RecordedDropout()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, values):
        return values + self.down(self.inner(torch.tanh(self.up(self.outer(values)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, values):
        values = self.scale(values)
        for block in self.blocks:
            values = block(values)
        return values


class Layout:
    """A layout plugin for Model; with sequence parallelism the blocks see slices of the rows, so all their dropout is sharded."""

    @hookimpl
    def declare_layout(self, model, plan):
        between = Shard(0) if plan.sequence_parallel else WHOLE
        modules = {
            "scale": ModuleLayout(parameters={"{weight,bias}": WHOLE}),
            "blocks.*.inner": ModuleLayout(sharded_dropout=True),
            "blocks.*.up": ModuleLayout(parameters={"{weight,bias}": Shard(0)}, inputs={0: Boundary(outside=between, inside=PARTIAL)}),
            "blocks.*.down": ModuleLayout(parameters={"weight": Shard(1)}, output=Boundary(outside=between, inside=Term())),
        }
        if plan.sequence_parallel:
            modules["blocks.*.outer"] = ModuleLayout(sharded_dropout=True)
            modules["blocks.0"] = ModuleLayout(inputs={0: Boundary(outside=WHOLE, inside=between)})
            modules["blocks.1"] = ModuleLayout(output=Boundary(outside=WHOLE, inside=between))
        return ModelLayout(axis="tp", modules=modules, units=("blocks.*",))


def on_meta():
    with torch.device("meta"):
        return Model()


def attached(plan):
    return attach(on_meta(), plan, plugins={"layout": Layout(), "double": OwnsEverything()}, backend=("double", "torch_native"), seed=2)


def masks_on_rank(plan):
    reduction = attached(plan)
    reduction.module(torch.ones(4, 8))
    return {
        name: (module.factors[0] > 0).int().tolist()
        for name, module in reduction.model.named_modules()
        if isinstance(module, RecordedDropout)
    }


@functools.cache
def masks(sequence_parallel):
    """Per rank of dp 2 x tp 2, name -> mask of the first forward."""
    plan = ParallelPlan(dp_replicate=2, tp=2, sequence_parallel=sequence_parallel)
    return [outcome.value for outcome in run_ranks(masks_on_rank, 4, plan, env=ENV, timeout_s=60)]


def distinct(values):
    return len({str(value) for value in values})


@pytest.mark.parametrize("name", ["blocks.0.outer", "blocks.1.outer"])
def test_masks_on_whole_activations_are_equal_within_tp_and_differ_between_data_ranks(name):
    first, second, third, fourth = (of_rank[name] for of_rank in masks(False))
    assert first == second and third == fourth and first != third


@pytest.mark.parametrize("name", ["blocks.0.inner", "blocks.1.inner"])
def test_masks_on_hidden_units_of_a_rank_are_its_own(name):
    assert distinct(of_rank[name] for of_rank in masks(False)) == 4


@pytest.mark.parametrize("name", ["blocks.0.outer", "blocks.1.outer", "blocks.0.inner", "blocks.1.inner"])
def test_masks_on_sequence_slices_of_a_rank_are_its_own(name):
    assert distinct(of_rank[name] for of_rank in masks(True)) == 4


def test_masks_differ_from_place_to_place():
    first = masks(False)[0]
    assert distinct(first.values()) == len(first) == 4


def two_updates_on_rank(recompute):
    """Gradient errors against one process under the forward's masks, the forwards counted, and whether they drew alike."""
    reduction = attached(ParallelPlan(tp=2, activation_checkpointing=recompute))
    model, reference = reduction.model, reference_model(on_meta, 2)
    errors, alike, number = [], True, set()
    for update in range(2):
        generator = torch.Generator().manual_seed(update)
        values, weights = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
        (reduction.module(values) * weights).sum().backward()
        gradients = reduction.finish(4).gradients
        hidden = reference.scale(values)
        for mine, theirs in zip(model.blocks, reference.blocks, strict=True):
            for dropout in (mine.outer, mine.inner):
                number.add(len(dropout.factors))
                alike = alike and all(torch.equal(dropout.factors[0], again) for again in dropout.factors[1:])
            outer = mine.outer.factors[0]
            inner = torch.cat(reduction.mesh.gather_objects(mine.inner.factors[0].detach()), -1)
            hidden = hidden + theirs.down(inner * torch.tanh(theirs.up(outer * hidden)))
            mine.outer.factors.clear()
            mine.inner.factors.clear()
        (hidden * weights).sum().backward()
        for name, parameter in reference.named_parameters():
            dim = {"up": 0, "down": 1}.get(name.split(".")[-2])
            wanted = parameter.grad if dim is None else parameter.grad.chunk(2, dim)[reduction.mesh.rank]
            errors.append(relative_error(gradients[name], wanted / 4))
        reduction.zero()
        reference.zero_grad()
    return max(errors), number, alike


@pytest.mark.parametrize(("recompute", "forwards"), [(False, {1}), (True, {2})], ids=["stored", "recomputed"])
def test_gradients_are_exact_against_the_masks_of_the_forward(recompute, forwards):
    for outcome in run_ranks(two_updates_on_rank, 2, recompute, env=ENV, timeout_s=60):
        error, number, alike = outcome.value
        assert error <= 1e-5 and number == forwards and alike


def evaluation_on_rank():
    reduction = attached(ParallelPlan(tp=2))
    reduction.module.eval()
    state = torch.get_rng_state()
    with torch.no_grad():
        reduction.module(torch.ones(4, 8))
    kept = all(bool((block.inner.factors[0] == 1.0).all()) for block in reduction.model.blocks)
    return kept and torch.equal(state, torch.get_rng_state())


def test_evaluation_drops_nothing_and_draws_nothing():
    assert all(outcome.value for outcome in run_ranks(evaluation_on_rank, 2, env=ENV, timeout_s=60))

"""What a rank keeps of each parameter: whole units, fused parts one by one, from the same initial values at every size."""

from __future__ import annotations

import pytest
import torch
from mixle_dtensor_tp.axis import TensorParallel
from torch import nn

from mixle_core import (
    Boundary,
    CapabilityError,
    ModelLayout,
    ModuleLayout,
    ParallelPlan,
    ParameterLayout,
    Replica,
    Shard,
    Term,
    attach,
    explain,
    hookimpl,
    load_plugins,
)
from mixle_core.audit import reference_model
from mixle_core.runtime import Mesh
from mixle_core.testing import ToyLayout, ToyLM, run_ranks, toy_model

ENV = {"MIXLE_PLUGINS": "dtensor-tp"}


def slice_of(role, tensor, tp, rank):
    """What the executor keeps on `rank`."""
    mesh = Mesh(ParallelPlan(tp=tp), torch.device("cpu"))
    mesh.coordinates = mesh.plan.coordinates(rank)
    layout = ParameterLayout("w", tuple(tensor.shape), "torch.float32", 4, trainable=True, roles={"tp": role})
    return TensorParallel().shard(layout, tensor, mesh)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("dim", "parts"), [(0, (8, 8)), (0, (8, 4, 4)), (1, (12, 4)), (1, (4, 4, 4, 4))])
def test_fused_parts_are_cut_one_by_one(dim, parts, tp):
    tensor = torch.randn(16, 16)
    for rank in range(tp):
        alone = [slice_of(Shard(dim), part, tp, rank) for part in tensor.split(list(parts), dim)]
        assert torch.equal(slice_of(Shard(dim, parts=parts), tensor, tp, rank), torch.cat(alone, dim))


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_put_together_are_the_whole_and_share_no_memory_with_it(dim):
    tensor = torch.randn(8, 12)
    pieces = [slice_of(Shard(dim), tensor, 4, rank) for rank in range(4)]
    assert torch.equal(torch.cat(pieces, dim), tensor)
    assert all(piece.is_contiguous() and piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces)


def test_a_replica_is_kept_whole():
    tensor = torch.randn(4)
    assert slice_of(Replica("partial"), tensor, 2, 1) is tensor


def materialised_toy():
    torch.manual_seed(11)
    return ToyLM()


def slices_on_rank(tp, meta):
    """Name -> whether this rank holds exactly its slice of the values of one process."""
    build = toy_model if meta else materialised_toy
    reduction = attach(build(), ParallelPlan(tp=tp), plugins={"toy": ToyLayout()}, seed=4)
    reference, rank = reference_model(build, 4), reduction.mesh.rank
    found = {}
    for name, parameter in reduction.named_parameters():
        whole, role = reference.get_parameter(name).detach(), reduction.layouts.parameters[name].roles["tp"]
        if isinstance(role, Shard):
            parts = whole.split(list(role.parts or (whole.shape[role.dim],)), role.dim)
            whole = torch.cat([part.chunk(tp, role.dim)[rank] for part in parts], role.dim)
        found[name] = torch.equal(parameter, whole) and tuple(parameter.shape) == reduction.table[name].local_shape
    return found


@pytest.mark.parametrize("meta", [True, False], ids=["from-meta", "materialised"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_holds_its_slice_of_the_values_of_one_process(tp, meta):
    for outcome in run_ranks(slices_on_rank, tp, tp, meta, env=ENV, timeout_s=60):
        assert len(outcome.value) == 22 and all(outcome.value.values()), outcome.value


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = nn.Linear(12, 8, bias=False)

    def forward(self, values):
        return self.output(values)


class RowLayout:
    """A layout plugin for Row: three heads of four."""

    @hookimpl
    def declare_layout(self, model, plan):
        role = Shard(1, unit=4, unit_name="query head")
        summed = Boundary(outside=Replica("complete"), inside=Term())
        return ModelLayout(axis="tp", modules={"output": ModuleLayout(parameters={"weight": role}, output=summed)})


class NoBoundary:
    """As a backend with parallel layers of its own declares them: how they compute is not said."""

    @hookimpl
    def declare_layout(self, model, plan):
        return ModelLayout(axis="tp", modules={"output": ModuleLayout(parameters={"weight": Shard(1)})})


def test_a_layout_that_cuts_and_says_nothing_of_activations_is_left_to_its_own_backend():
    plugins = load_plugins(["dtensor-tp"], extra={"own": NoBoundary()})
    with pytest.raises(CapabilityError, match=r"the layout cuts parameters over tp and declares no boundary"):
        explain(Row(), ParallelPlan(tp=2), plugins=plugins)


@pytest.mark.parametrize("tp", [2, 4, 6])
def test_heads_of_a_row_matrix_that_tp_does_not_divide_are_refused_by_name(tp):
    plugins = load_plugins(["dtensor-tp"], extra={"row": RowLayout()})
    with pytest.raises(CapabilityError, match=rf"^output\.weight: dim 1 has 3 query heads, which tp={tp} does not divide"):
        explain(Row(), ParallelPlan(tp=tp), plugins=plugins)
    assert explain(Row(), ParallelPlan(tp=3), plugins=plugins)["output.weight"].local_shape == (8, 4)


def attach_on_rank():
    attach(toy_model(), ParallelPlan(tp=3), plugins={"toy": ToyLayout()})


def test_the_refusal_reaches_every_rank():
    outcomes = run_ranks(attach_on_rank, 3, env=ENV, timeout_s=30, check=False)
    assert [outcome.error for outcome in outcomes] == ["CapabilityError"] * 3
    assert all(o.message.startswith("blocks.0.down.weight: dim 1 has 4 units, which tp=3 does not divide") for o in outcomes), outcomes

"""Norms, clipping, the decision about non-finite gradients, and the sums of many tensors, over parameters on different axes."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import mixle_core as mx
from mixle_core.runtime import Mesh, counted_traffic, reduce_coalesced
from mixle_core.testing import OwnsEverything, SumOwner, run_ranks

Plan = mx.ParallelPlan
SHAPES = {"column": (8, 4), "norm": (8,), "expert": (4, 6), "plain": (5,)}


class Bag(nn.Module):
    """Four parameters and a linear loss, so that every gradient is known: the coefficients."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, coefficients):
        return sum((parameter * coefficients[name]).sum() for name, parameter in self.named_parameters())


def coefficients(data_rank):
    generator = torch.Generator().manual_seed(data_rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Cut:
    """Executes tp, or cp, by doing no more than cutting `column` on dim 1."""

    def shard(self, layout, tensor, mesh):
        role = layout.roles.get("tp")
        return tensor.chunk(mesh.plan.tp, role.dim)[mesh.coordinates["tp"]].clone() if isinstance(role, mx.Shard) else tensor

    def apply(self, model, layouts, mesh):
        pass


class DataShards(SumOwner):
    """Sums like its base, then keeps this rank's rows only, as an owner that stores shards does."""

    def finish(self, observe):
        result = super().finish(observe)
        plan, at = self._mesh.plan, self._mesh.coordinates["dp_shard"]
        kept = {name: mx.Gradient(g.tensor.chunk(plan.dp_shard)[at], g.weight) for name, g in result.gradients.items()}
        return mx.OwnerReduction(kept, result.counts)


class OnTwoAxes:
    """Layout, executor and owners: column is cut on tp and dp, norm and expert on dp, plain is whole everywhere."""

    @mx.hookimpl
    def declare_layout(self, model, plan):
        roles = {name: mx.Shard(1) if name == "column" else mx.Replica("complete") for name in SHAPES}
        return mx.ModelLayout(axis="tp", modules={"": mx.ModuleLayout(parameters=roles)})

    @mx.hookimpl
    def own_axis(self, plan, layouts):
        return tuple(mx.AxisClaim(axis=axis, executor=Cut, backend="double") for axis in plan.executed_axes)

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        claim = partial(mx.Claim, axes={"dp_shard", "tp"}, backend="double")
        shards = partial(DataShards, plan, layouts.transparent)
        return (
            claim(owner=shards, parameters=["column", "norm", "expert"], stored=("dp_shard",)),
            claim(owner=partial(SumOwner, plan, layouts.transparent), parameters=["plain"]),
        )


def sliced(values, mesh):
    return {**values, "column": Cut().shard(mx.ParameterLayout("", (), "", 4, True, roles={"tp": mx.Shard(1)}), values["column"], mesh)}


def reduced_on_two_axes(scale, max_norm):
    """On each of four ranks: norms before, factor, then what is left of every gradient after clipping, and the p=1 norm of that."""
    reduction = mx.attach(Bag(), Plan(dp_shard=2, tp=2), plugins={"two": OnTwoAxes()})
    at = reduction.mesh.coordinates["dp_shard"]
    values = coefficients(at)
    values["plain"] *= scale
    reduction.module(sliced(values, reduction.mesh)).backward()
    reduced = reduction.finish(3)
    norms = {kind: reduced.norm(kind) for kind in (2.0, 1.0, math.inf)}
    factor = reduced.clip_(max_norm)
    again = reduced.clip_(max_norm)
    pieces = {name: (gradient.clone(), reduction.table[name].copies) for name, gradient in reduced.gradients.items()}
    return norms, (factor, again), pieces, reduced.norm(1.0), reduced.nonfinite


def whole_gradients(scale):
    both = [coefficients(0), coefficients(1)]
    total = {name: (both[0][name].double() + both[1][name].double()) / 6 for name in SHAPES}
    total["plain"] *= scale
    return torch.cat([value.flatten() for value in total.values()])


def test_norms_over_different_axes_are_those_of_the_whole_gradients_on_every_rank():
    """C26, C28: each distinct value counts once, and the infinity norm is the maximum everywhere."""
    whole = whole_gradients(1.0)
    for outcome in run_ranks(reduced_on_two_axes, 4, 1.0, 1e9, timeout_s=60):
        norms, factors, _, _, _ = outcome.value
        assert factors == (1.0, 1.0)
        assert norms == pytest.approx({kind: float(torch.linalg.vector_norm(whole, kind)) for kind in norms}, rel=1e-6)


def test_clipping_is_seen_on_the_gradients_and_clipping_twice_clips_once():
    """C31: the norm of what the optimizer will read is the limit, and all slices were scaled by one factor."""
    whole = whole_gradients(1.0)
    limit = float(whole.norm()) / 2
    outcomes = run_ranks(reduced_on_two_axes, 4, 1.0, limit, timeout_s=60)
    square = sum(float(piece.double().square().sum()) / copies for o in outcomes for piece, copies in o.value[2].values())
    assert math.sqrt(square) == pytest.approx(limit, rel=1e-6)
    for outcome in outcomes:
        assert outcome.value[1] == pytest.approx((0.5, 0.5), rel=1e-6)
        assert outcome.value[3] == pytest.approx(float(whole.abs().sum()) / 2, rel=1e-6)


def test_finite_gradients_whose_square_overflows_fp32_have_their_right_norm():
    whole = whole_gradients(1e30)
    outcomes = run_ranks(reduced_on_two_axes, 4, 1e30, 1.0, timeout_s=60)
    for outcome in outcomes:
        norms, factors, pieces, _, nonfinite = outcome.value
        assert nonfinite == () and norms[2.0] == pytest.approx(float(whole.norm()), rel=1e-6)
        assert factors[0] == pytest.approx(1.0 / float(whole.norm()), rel=1e-6)
        assert float(pieces["plain"][0].norm()) == pytest.approx(1.0, rel=1e-5)


def poisoned_session(value, everywhere):
    """Three updates of two ranks; in the second, one entry of rank 1's gradient is `value`."""
    plan = Plan(dp_replicate=2) if everywhere else Plan(tp=2)
    plugins = {"double": OwnsEverything()} if everywhere else {"layout": OnlyLayout(), "double": OwnsEverything()}
    values = {}  # slices, so the ranks of tp differ in them; the batch that they share is the number of the update
    session = mx.prepare(
        Bag(),
        plan,
        loss=lambda module, batch: (module({name: v.unsqueeze(0) for name, v in values.items()}), 4),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
        max_grad_norm=1.0,
        plugins=plugins,
    )
    trail = []
    for update in range(3):
        values.update(sliced(coefficients(update), session.reduction.mesh))
        if update == 1 and dist.get_rank() == 1:
            values["column"][2, 1] = value
        receipt = session.train_batch(torch.full((1,), update))
        parameters = {name: p.detach().clone() for name, p in session.reduction.named_parameters()}
        state = [s["exp_avg"].clone() for s in session.optimizers["**"].state.values()]
        trail.append((receipt, parameters, state, session.schedulers["**"].last_epoch))
    return trail


class OnlyLayout:
    """tp cuts column, the others are complete; executed by cutting alone."""

    declare_layout, own_axis = OnTwoAxes.declare_layout, OnTwoAxes.own_axis


@pytest.mark.parametrize("everywhere", [True, False], ids=["in-a-replica", "in-a-slice-of-one-rank"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_of_one_rank_stops_the_update_on_all_ranks(value, everywhere):
    """C29: no parameter, no state and no schedule moves, and both ranks say the same and go on."""
    outcomes = run_ranks(poisoned_session, 2, value, everywhere, timeout_s=60)
    for outcome in outcomes:
        first, second, third = outcome.value
        assert second[0].skipped == "non-finite gradient: column" and second[0].committed
        assert (first[0].skipped, third[0].skipped) == (None, None)
        assert all(torch.equal(first[1][name], second[1][name]) for name in SHAPES)
        assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
        assert [step[3] for step in outcome.value] == [1, 1, 2]
        assert not any(torch.equal(second[1][name], third[1][name]) for name in SHAPES)
    assert len({repr([step[0].grad_norm for step in outcome.value]) for outcome in outcomes}) == 1


def mean_over_tokens():
    """C19: dp 2 x cp 2, four and twelve valid tokens split over cp; the gradient of a squared loss of three weights."""
    plan = Plan(dp_replicate=2, cp=2)
    model = nn.Linear(3, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    reduction = mx.attach(model, plan, plugins={"axis": OnlyAxis(), "double": OwnsEverything()})
    rows = tokens_of(reduction.mesh.coordinates["dp_replicate"]).chunk(2)[reduction.mesh.coordinates["cp"]]
    loss = reduction.module(rows).square().sum()
    loss.backward()
    reduced = reduction.finish(len(rows), float(loss.detach()))
    return reduced.gradients["weight"], reduced.num_tokens, reduced.loss


class OnlyAxis:
    own_axis = OnTwoAxes.own_axis


def tokens_of(data_rank):
    return torch.randn(4 if data_rank == 0 else 12, 3, generator=torch.Generator().manual_seed(data_rank))


def test_ranks_with_unequal_tokens_give_the_mean_over_all_tokens():
    weight = torch.full((1, 3), 0.5, requires_grad=True)
    loss = (torch.cat([tokens_of(0), tokens_of(1)]) @ weight.T).square().sum() / 16
    loss.backward()
    for outcome in run_ranks(mean_over_tokens, 4, timeout_s=60):
        gradient, num_tokens, mean = outcome.value
        assert num_tokens == 16 and mean == pytest.approx(float(loss.detach()), rel=1e-6)
        assert torch.allclose(gradient, weight.grad, rtol=1e-6)


def half_precision_sum(dtype):
    mesh = Mesh(Plan(dp_replicate=4), torch.device("cpu"))
    group = mesh.group(("dp_replicate",), "half")
    big = torch.tensor([256.0 if dist.get_rank() == 0 else 0.5, 1.0], dtype=dtype)
    strided = torch.ones(2, 2, dtype=dtype).T
    reduce_coalesced([big, torch.empty(0, dtype=dtype), strided], group)
    return big, strided, counted_traffic("mixle:half:")


def test_half_precision_is_summed_in_fp32_and_comes_back_in_its_own():
    """In bf16, 256 + 0.5 stays 256 however often it is added; the fp32 sum 257.5 rounds to 258."""
    for outcome in run_ranks(half_precision_sum, 4, torch.bfloat16, timeout_s=60):
        big, strided, traffic = outcome.value
        assert big.dtype == torch.bfloat16 and big.tolist() == [258.0, 4.0] and strided.tolist() == [[4.0, 4.0], [4.0, 4.0]]
        assert {key: (t.num_collectives, t.payload_bytes) for key, t in traffic.items()} == {"mixle:half:dp_replicate|allreduce": (1, 24)}


def bucketed_sum(bucket_bytes):
    mesh = Mesh(Plan(dp_replicate=2), torch.device("cpu"))
    sizes = (3, 5, 2, 20, 1)
    tensors = [torch.full((size,), float(size)) for size in sizes] + [torch.ones(4, dtype=torch.float64)]
    reduce_coalesced(tensors, mesh.group(("dp_replicate",), "buckets"), bucket_bytes=bucket_bytes)
    assert all(torch.equal(tensor, torch.full((size,), 2.0 * size)) for tensor, size in zip(tensors, sizes, strict=False))
    assert tensors[-1].dtype == torch.float64 and tensors[-1].tolist() == [2.0] * 4
    (traffic,) = counted_traffic("mixle:buckets:").values()
    return traffic.num_collectives, traffic.payload_bytes


@pytest.mark.parametrize(("bucket_bytes", "collectives"), [(32, 3 + 1), (41, 2 + 1), (1, 5 + 1), (10**6, 1 + 1)])
def test_a_bucket_is_full_once_its_bytes_are_reached_and_dtypes_are_not_mixed(bucket_bytes, collectives):
    """fp32 tensors of 12, 20, 8, 80 and 4 bytes in order, and one fp64 tensor apart."""
    for outcome in run_ranks(bucketed_sum, 2, bucket_bytes, timeout_s=60):
        assert outcome.value == (collectives, 31 * 4 + 4 * 8)


def test_without_a_group_a_sum_is_what_this_rank_has():
    tensors = [torch.ones(3)]
    reduce_coalesced(tensors, None)
    assert tensors[0].tolist() == [1.0, 1.0, 1.0]

"""What the shell and the sharded parameters are to their user; sums and not means; one decision about gradients that are not finite."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mixle_core import ParallelPlan, attach
from mixle_core.audit import assemble
from mixle_core.runtime import counted_traffic
from mixle_core.testing import next_token_loss, token_batch, toy_model

FSDP2 = ParallelPlan(dp_shard=2)
HSDP = ParallelPlan(dp_replicate=2, dp_shard=2)


def seen_from_outside(plan):
    model = toy_model()
    model.note = "kept"
    names = list(model.state_dict())
    modules = [name for name, _ in model.named_modules()]
    reduction = attach(model, plan)
    for _ in range(2):  # the second time after a forward, which leaves the root gathered until the backward
        for name, parameter in reduction.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert parameter.device_mesh.mesh_dim_names == tuple(axis for axis in ("dp_replicate", "dp_shard") if plan.size(axis) > 1)
            assert parameter.placements == (*[Replicate()] * (plan.dp_replicate > 1), Shard(0))
            whole = reduction.table[name].shape
            assert tuple(parameter.shape) == whole and parameter.to_local().shape[0] == whole[0] // 2
        assert list(reduction.model.state_dict()) == names
        assert [name for name, _ in reduction.model.named_modules()] == modules
        loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, reduction.mesh.rank))
        loss.backward()
        reduction.finish(tokens)
        reduction.zero()
    shell = reduction.module
    assert shell is not model and reduction.model is model
    assert shell.note == "kept" and shell.embed is model.embed and shell.blocks[1] is model.blocks[1]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = shell.nothing_of_this_name
    return sorted({key.partition("|")[0] for key in counted_traffic("mixle:")})


@pytest.mark.parametrize(("plan", "axes"), [(FSDP2, ["dp_shard"]), (HSDP, ["dp_replicate", "dp_shard"])], ids=["fsdp2", "hsdp2x2"])
def test_parameters_are_dtensors_on_the_plans_mesh_under_the_names_they_had(ranks, plan, axes):
    world = ".".join(axes)
    for outcome in ranks(seen_from_outside, plan.world_size, plan):
        assert outcome.value == sorted([f"mixle:control:{world}", *(f"mixle:torch-fsdp2:{axis}" for axis in axes)])


def sums(plan):
    """One token in all, so that nothing is scaled: reduced over the sum of the ranks' gradients, and the operations used."""
    from mixle_torch_fsdp2 import reduction as plugin

    used, original = set(), plugin.reduce_scatter
    plugin.reduce_scatter = lambda out, values, group, op, async_op: (used.add(str(op)), original(out, values, group, op, async_op))[1]
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    reference = copy.deepcopy(model)
    reduction = attach(model, plan)
    ratios = []
    for update in range(2):
        inputs = [torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * update + r)) for r in range(plan.world_size)]
        reduction.module(inputs[reduction.mesh.rank]).float().sum().backward()
        reduced = reduction.finish(1 if reduction.mesh.rank == 0 else 0)
        pieces = reduction.mesh.gather_objects(reduced.gradients["weight"])
        whole, _ = assemble(plan, reduction.table["weight"], pieces)
        wanted = 0.0
        for rows in inputs:
            wanted = wanted + torch.autograd.grad(reference(rows).sum(), [reference.weight])[0]
        ratios.append(float(whole.norm() / wanted.norm()))
        reduction.zero()
    return ratios, sorted(used)


def all_sums(plans):
    return {plan.describe(): sums(plan) for plan in plans}


SUMS = {2: [FSDP2], 3: [ParallelPlan(dp_shard=3)], 4: [HSDP, ParallelPlan(dp_shard=4, precision="bf16")]}


@pytest.mark.parametrize("world_size", list(SUMS))
def test_the_gradient_is_the_sum_over_the_ranks_by_a_plain_sum(ranks, world_size):
    """No mean, and no PREMUL_SUM: gloo does not have it, and on NCCL it zeroes bf16 gradients up to torch 2.13."""
    for outcome in ranks(all_sums, world_size, SUMS[world_size]):
        assert len(outcome.value) == len(SUMS[world_size])
        for ratios, operations in outcome.value.values():
            assert all(abs(ratio - 1.0) < 1e-2 for ratio in ratios)
            assert operations == ["RedOpType.SUM"]


def half_precision():
    """Per update: share of elements equal to the fp32 sum rounded once, the same for a sum in bf16, and bytes of the reduction."""
    torch.manual_seed(0)
    model = nn.Linear(32, 64, dtype=torch.bfloat16)
    alone = copy.deepcopy(model)
    reduction = attach(model, ParallelPlan(dp_shard=4))
    found = []
    for update in range(2):
        inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(10 * update + reduction.mesh.rank)).bfloat16()
        (mine,) = torch.autograd.grad(alone(inputs).float().sum(), [alone.weight])
        everyone = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(everyone, mine)
        before = counted_traffic("mixle:torch-fsdp2:").get("mixle:torch-fsdp2:dp_shard|reduce_scatter_base")
        reduction.module(inputs).float().sum().backward()
        reduced = reduction.finish(1 if reduction.mesh.rank == 0 else 0)
        sent = counted_traffic("mixle:torch-fsdp2:")["mixle:torch-fsdp2:dp_shard|reduce_scatter_base"].payload_bytes
        exact, in_bf16 = torch.stack(everyone).double().sum(0).bfloat16(), sum(everyone[1:], everyone[0])
        here = slice(16 * reduction.mesh.rank, 16 * reduction.mesh.rank + 16)
        found.append(
            (
                reduced.gradients["weight"].dtype == torch.bfloat16,
                float((reduced.gradients["weight"] == exact[here]).float().mean()),
                float((in_bf16 == exact).float().mean()),
                sent - (before.payload_bytes if before else 0),
            )
        )
        reduction.zero()
    return found


def test_gradients_of_a_half_precision_model_travel_as_fp32_and_are_rounded_once(ranks):
    for outcome in ranks(half_precision, 4):
        for is_half, exact, exact_in_bf16, sent in outcome.value:
            assert is_half and exact == 1.0
            assert exact_in_bf16 < 0.95, "a sum in bf16 gives other numbers, or this test would show nothing"
            assert sent == 4 * (64 * 32 + 64)


def nonfinite(value):
    """Only the last row of the gradient is not finite, and only the last rank holds it."""
    torch.manual_seed(0)
    reduction = attach(nn.Linear(4, 4), FSDP2)
    optimizer = torch.optim.AdamW([p for _, p in reduction.named_parameters()], lr=0.1)
    before = {name: p.to_local().clone() for name, p in reduction.named_parameters()}
    factors = torch.tensor([1.0, 1.0, 1.0, value if reduction.mesh.rank == 0 else 1.0])
    (reduction.module(torch.ones(2, 4)) * factors).sum().backward()
    reduced = reduction.finish(2)
    finite_here = all(bool(torch.isfinite(gradient).all()) for gradient in reduced.gradients.values())
    reduced.clip_(1.0)
    if reduced.skipped is None:
        optimizer.step()
    unchanged = all(torch.equal(before[name], p.to_local()) for name, p in reduction.named_parameters())
    return finite_here, reduced.skipped, reduced.nonfinite, unchanged


def not_a_number_and_infinity():
    return [nonfinite(float("nan")), nonfinite(float("inf"))]


def test_what_only_the_owner_of_a_shard_sees_is_a_skipped_step_on_every_rank(ranks):
    for first, second in zip(*(outcome.value for outcome in ranks(not_a_number_and_infinity, 2)), strict=True):
        assert (first[0], second[0]) == (True, False)
        assert first[1:] == second[1:] == ("non-finite gradient: bias, weight", ("bias", "weight"), True)

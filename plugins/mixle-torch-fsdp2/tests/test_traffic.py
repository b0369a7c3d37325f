"""What goes over the wire: counted, and compared with fully_shard written by hand on the same units."""

from __future__ import annotations

from contextlib import nullcontext

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from mixle_core import ParallelPlan, attach
from mixle_core.runtime import counted_traffic

WIDTH, BLOCKS, CLASSES = 32, 3, 7


class Model(nn.Module):
    """Blocks are units; the head is the root's. 7 rows do not divide, so the head is padded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, values):
        for block in self.blocks:
            values = torch.tanh(block(values))
        return self.head(values)


def counted(prefix):
    """axis|operation -> (calls, bytes) over all groups whose description starts with `prefix`."""
    return {key.removeprefix(prefix): (t.num_collectives, t.payload_bytes) for key, t in counted_traffic(prefix).items()}


def since(before, prefix):
    now = counted(prefix)
    return {key: tuple(a - b for a, b in zip(now[key], before.get(key, (0, 0)), strict=True)) for key in now if now[key] != before.get(key)}


def ours(plan, updates=3, early=0):
    reduction = attach(Model(), plan)
    found = []
    for _ in range(updates):
        before = counted("mixle:torch-fsdp2:")
        for backward in range(plan.num_backwards - early):
            with reduction.no_sync() if backward < plan.num_backwards - 1 else nullcontext():
                reduction.module(torch.ones(2, WIDTH)).sum().backward()
        (receipt,) = reduction.finish(2).owners
        found.append(since(before, "mixle:torch-fsdp2:"))
        assert receipt.num_collectives == sum(calls for calls, _ in found[-1].values())
        assert receipt.payload_bytes == sum(size for _, size in found[-1].values())
        reduction.zero()
    return found


def by_hand(plan, updates=3):
    """The loop one would write, with the root's parameters gathered once for a forward and its backward."""
    axes = [axis for axis in ("dp_replicate", "dp_shard") if plan.size(axis) > 1]
    groups = []
    for axis in axes:
        for members in sorted({plan.group_ranks(rank, [axis]) for rank in range(plan.world_size)}):
            group = dist.new_group(list(members), group_desc=f"hand:{axis}")
            if dist.get_rank() in members:
                groups.append(group)
    ranks = torch.arange(plan.world_size).view([plan.size(axis) for axis in axes])
    mesh = DeviceMesh.from_group(groups if len(axes) > 1 else groups[0], "cpu", mesh=ranks, mesh_dim_names=tuple(axes))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if plan.precision == "bf16" else MixedPrecisionPolicy()
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    found = []
    for _ in range(updates):
        before = counted("hand:")
        for backward in range(plan.num_backwards):
            last = backward == plan.num_backwards - 1
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            model(torch.ones(2, WIDTH)).float().sum().backward()
        found.append(since(before, "hand:"))
        for parameter in model.parameters():
            parameter.grad = None
    assert isinstance(model, FSDPModule)
    return found


def both(plan):
    return ours(plan), by_hand(plan)  # ours first, since counting starts with a mesh


UNIT, ROOT = (WIDTH * WIDTH + WIDTH) * 4, (WIDTH + 1) * (CLASSES + 1) * 4
"""Payload of one gather or reduce-scatter: a block, and what the root holds with a row of padding."""


def expected(backwards, *, hybrid=False):
    """A block is gathered for forward and backward, the root once; all are reduced once."""
    gathers = backwards * (2 * BLOCKS + 1), backwards * (2 * BLOCKS * UNIT + ROOT)
    traffic = {"dp_shard|allgather_base": gathers, "dp_shard|reduce_scatter_base": (BLOCKS + 1, BLOCKS * UNIT + ROOT)}
    return traffic | ({"dp_replicate|allreduce": (BLOCKS + 1, (BLOCKS * UNIT + ROOT) // 2)} if hybrid else {})


def compared(plan):
    """For 1 and for 2 accumulated backwards."""
    return {backwards: both(attrs.evolve(plan, gradient_accumulation_steps=backwards)) for backwards in (1, 2)}


@pytest.mark.parametrize("plan", [ParallelPlan(dp_shard=2), ParallelPlan(dp_replicate=2, dp_shard=2)], ids=["fsdp2", "hsdp2x2"])
def test_calls_and_bytes_of_an_update_equal_those_of_the_loop_written_by_hand(ranks, plan):
    for outcome in ranks(compared, plan.world_size, plan):
        for backwards, (mine, hand) in outcome.value.items():
            assert mine[1] == mine[2] == hand[1] == hand[2] == expected(backwards, hybrid=plan.dp_replicate > 1)
            assert mine[0] == mine[1], "the first update costs no call more either"


def others():
    two = ParallelPlan(dp_shard=2, gradient_accumulation_steps=2)
    return {
        "bf16": both(ParallelPlan(dp_shard=2, precision="bf16")),
        "early": ours(ParallelPlan(dp_shard=2, gradient_accumulation_steps=3), 3, 1),
        "varies": ours(attrs.evolve(two, unused_parameters=True)),
    }


def test_a_window_that_ends_early_and_use_that_may_vary_cost_no_call_more(ranks):
    for outcome in ranks(others, 2):
        assert outcome.value["early"] == outcome.value["varies"] == [expected(2)] * 3
        mine, hand = outcome.value["bf16"]
        assert mine[2] == hand[2]
        assert mine[2]["dp_shard|reduce_scatter_base"] == expected(1)["dp_shard|reduce_scatter_base"]
        assert 2 * mine[2]["dp_shard|allgather_base"][1] == expected(1)["dp_shard|allgather_base"][1]

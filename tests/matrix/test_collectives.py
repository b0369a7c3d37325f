"""Counted collectives and payload bytes of an update against hand-written loops: never more."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.distributed as dist
from mixle_dtensor_tp.axis import TensorParallel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mixle_core as mx
from mixle_core.runtime import Mesh, counted_traffic
from mixle_core.runtime.arbitration import arbitration
from mixle_core.runtime.initialise import place_parameters
from mixle_core.testing import next_token_loss, run_ranks, token_batch

Plan = mx.ParallelPlan
HAND = "hand"
UPDATES = 4
"""The last one is counted: until then DistributedDataParallel rebuilds its buckets and the first update looks at use."""


def build():
    plugins = mx.load_plugins(required=["qwen3"])
    return plugins.ask_one("qwen3", "build_model", spec="tiny")


def counted(prefix):
    found = {"calls": 0, "bytes": 0}
    for traffic in counted_traffic(prefix).values():
        found["calls"] += traffic.num_collectives
        found["bytes"] += traffic.payload_bytes
    return found


def difference(after, before):
    return {key: after[key] - before[key] for key in after}


def ours(plan):
    """Traffic of one update through `attach`: the owners' groups, and the control group apart."""
    reduction = mx.attach(build(), plan)
    data_rank = reduction.mesh.coordinates["dp_replicate"] + reduction.mesh.coordinates["dp_shard"]
    for update in range(UPDATES):
        labels = [f"mixle:{owner}:" for owner in reduction.table.owners]
        before = [counted(label) for label in labels], counted("mixle:control:")
        for backward in range(plan.num_backwards):
            last = backward == plan.num_backwards - 1
            batch = token_batch(update, backward, data_rank, length=16)
            if last:
                loss, tokens = next_token_loss(reduction.module, batch)
                loss.backward()
            else:
                with reduction.no_sync():
                    loss, tokens = next_token_loss(reduction.module, batch)
                    loss.backward()
        reduced = reduction.finish(tokens * plan.num_backwards)
        reduced.clip_(1.0)
        reduction.zero()
        owners = [difference(counted(label), was) for label, was in zip(labels, before[0], strict=True)]
        control = difference(counted("mixle:control:"), before[1])
    total = {key: sum(owner[key] for owner in owners) for key in ("calls", "bytes")}
    assert total == {
        "calls": sum(receipt.num_collectives for receipt in reduced.owners),
        "bytes": sum(receipt.payload_bytes for receipt in reduced.owners),
    }, "the receipt says what was counted"
    return total, control


def by_hand(plan):
    """The loop one would write: torch's wrapper over the data axis, and one flat all-reduce of the tp replicas before the step."""
    won = arbitration(build(), plan, None, None)
    mesh = Mesh(plan, torch.device("cpu"))
    executor = TensorParallel() if plan.tp > 1 else None

    def shard(name, tensor):
        return executor.shard(won.layouts.parameters[name], tensor, mesh) if executor else tensor

    model = build()
    place_parameters(model, won.layouts, 0, torch.device("cpu"), shard, lambda *_: frozenset())
    if executor:
        executor.apply(model, won.layouts, mesh)
    data_axis = "dp_shard" if plan.dp_shard > 1 else "dp_replicate"
    group, tp_group = (
        dist.new_group(list(mesh.plan.group_ranks(mesh.rank, [axis])), use_local_synchronization=True, group_desc=HAND)
        if size > 1
        else None
        for axis, size in ((data_axis, plan.data_size), ("tp", plan.tp))
    )
    partial = [
        p for name, p in model.named_parameters() if plan.tp > 1 and won.layouts.parameters[name].roles["tp"] == mx.Replica("partial")
    ]
    module = model
    if plan.dp_shard > 1:
        device_mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
        names = dict(model.named_parameters())
        partial = [p for name, p in names.items() if plan.tp > 1 and won.layouts.parameters[name].roles["tp"] == mx.Replica("partial")]
    elif plan.dp_replicate > 1:
        module = DistributedDataParallel(model, process_group=group, forward_sync_buffers=False, gradient_as_bucket_view=True)
    for update in range(UPDATES):
        before = counted(HAND)
        for backward in range(plan.num_backwards):
            last = backward == plan.num_backwards - 1
            if plan.dp_shard > 1:
                module.set_requires_gradient_sync(last)
            elif plan.dp_replicate > 1:
                module.require_backward_grad_sync = last
            loss, _ = next_token_loss(module, token_batch(update, backward, mesh.rank // plan.tp, length=16))
            loss.backward()
        if tp_group is not None:
            local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in partial]
            dist.all_reduce(torch.cat([g.flatten() for g in local]), group=tp_group)
        for parameter in model.parameters():
            parameter.grad = None
    return difference(counted(HAND), before)


def measure(plan):
    return ours(plan), by_hand(plan)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_replicate=2),
        Plan(dp_shard=2),
        Plan(tp=2),
        Plan(tp=2, sequence_parallel=True),
        Plan(dp_replicate=2, tp=2),
        Plan(dp_replicate=2, tp=2, sequence_parallel=True),
        Plan(dp_shard=2, tp=2),
        Plan(dp_shard=2, tp=2, sequence_parallel=True),
    ],
    ids=lambda plan: plan.describe() + ("-sp" if plan.sequence_parallel else ""),
)
def test_no_more_collectives_and_bytes_than_the_hand_written_loop(plan, steps):
    plan = attrs.evolve(plan, gradient_accumulation_steps=steps)
    (owners, control), hand = run_ranks(measure, plan.world_size, plan, reuse=True)[0].value
    print(f"{plan.describe()} sp={plan.sequence_parallel} x{steps}: ours {owners}, control {control}, by hand {hand}")
    assert owners["calls"] <= hand["calls"]
    assert owners["bytes"] <= hand["bytes"]
    assert owners["calls"] > 0
    assert control["calls"] <= 2
    assert control["bytes"] <= 2 * 1024

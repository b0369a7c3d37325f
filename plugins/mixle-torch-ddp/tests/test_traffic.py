"""What goes over the wire: counted, and compared with DistributedDataParallel written by hand on the same model."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixle_core import ParallelPlan, attach
from mixle_core.runtime import counted_traffic

WIDTH, LAYERS = 512, 4
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def counted(prefix):
    """(operation, calls, bytes) over all groups whose description starts with `prefix`."""
    by_operation = {}
    for key, traffic in counted_traffic(prefix).items():
        calls, size = by_operation.get(key.partition("|")[2], (0, 0))
        by_operation[key.partition("|")[2]] = calls + traffic.num_collectives, size + traffic.payload_bytes
    return by_operation


def since(before, prefix):
    found = {}
    for operation, (calls, size) in counted(prefix).items():
        earlier = before.get(operation, (0, 0))
        if calls > earlier[0]:
            found[operation] = calls - earlier[0], size - earlier[1]
    return found


def ours(bucket_mb, window, updates, early):
    from mixle_torch_ddp import reduction as plugin

    plugin._BUCKET_MB = bucket_mb
    reduction = attach(stack(), ParallelPlan(dp_replicate=2, gradient_accumulation_steps=window))
    found = []
    for _ in range(updates):
        before = counted("mixle:torch-ddp:")
        for backward in range(window - early):
            with reduction.no_sync() if backward < window - 1 else nullcontext():
                reduction.module(torch.ones(2, WIDTH)).sum().backward()
        (receipt,) = reduction.finish(2).owners
        found.append(since(before, "mixle:torch-ddp:"))
        assert receipt.num_parameters == 2 * LAYERS
        assert receipt.num_collectives == sum(calls for calls, _ in found[-1].values())
        assert receipt.payload_bytes == sum(size for _, size in found[-1].values())
        reduction.zero()
    return found


def by_hand(bucket_mb, window, updates):
    group = dist.new_group([0, 1], group_desc="hand")
    module = DistributedDataParallel(stack(), process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    found = []
    for _ in range(updates):
        before = counted("hand")
        for backward in range(window):
            with module.no_sync() if backward < window - 1 else nullcontext():
                module(torch.ones(2, WIDTH)).sum().backward()
        found.append(since(before, "hand"))
        module.zero_grad()
    return found


BUCKETS = {25: 1, 1: LAYERS}
"""Bucket size in MB -> calls: all gradients at once, or a layer at a time."""


def compared():
    """Four updates of each loop: by the fourth, DistributedDataParallel has rebuilt its buckets."""
    cases = [(bucket_mb, window) for bucket_mb in BUCKETS for window in (1, 4)]
    return {case: (ours(*case, 4, 0), by_hand(*case, 4)) for case in cases}  # ours first: counting starts with a mesh


def test_calls_and_bytes_of_an_update_equal_those_of_the_loop_written_by_hand(ranks):
    for outcome in ranks(compared, 2):
        for (bucket_mb, _), (mine, hand) in outcome.value.items():
            assert mine[3] == hand[3] == {"allreduce": (BUCKETS[bucket_mb], LAYERS * LAYER_BYTES)}
            assert mine[0] == mine[3], "the first update, which reduces after its last backward, costs as much"


def test_a_window_that_ends_early_costs_as_much(ranks):
    for outcome in ranks(ours, 2, 1, 3, 3, 1):
        assert outcome.value == [{"allreduce": (LAYERS, LAYERS * LAYER_BYTES)}] * 3


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, values):
        return self.norm(self.layer(values))


def buffers():
    torch.manual_seed(dist.get_rank())
    model = Normed()
    model.norm.running_mean.fill_(float(dist.get_rank() + 7))
    reduction = attach(model, ParallelPlan(dp_replicate=2))
    start = model.norm.running_mean.tolist()
    in_forward = []
    for _ in range(4):
        before = counted("")
        values = reduction.module(torch.randn(8, 4))
        in_forward.append(since(before, ""))
        values.sum().backward()
        reduction.finish(8)
        reduction.zero()
    before = counted("")
    with torch.no_grad():
        reduction.module(torch.randn(8, 4))
    in_forward.append(since(before, ""))
    return start, in_forward, model.norm.running_mean.tolist()


def test_buffers_are_equal_at_the_start_and_no_forward_communicates(ranks):
    """But for two numbers a bucket, once: after the first backward that overlapped, the ranks agree on the order of the buckets."""
    first, second = (outcome.value for outcome in ranks(buffers, 2))
    assert first[0] == second[0] == [7.0] * 4
    assert first[1] == second[1] == [{}, {}, {"broadcast": (2, 24)}, {}, {}]
    assert first[2] != second[2]


def half_precision():
    """Per update: all-reduces and their bytes, share of elements equal to the fp32 sum rounded once, and the same for a sum in bf16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, dtype=torch.bfloat16), nn.Linear(64, 8, dtype=torch.bfloat16))
    alone = copy.deepcopy(model)
    reduction = attach(model, ParallelPlan(dp_replicate=4))
    found = []
    for update in range(3):
        inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(10 * update + reduction.mesh.rank)).bfloat16()
        mine = torch.cat([g.flatten() for g in torch.autograd.grad(alone(inputs).float().sum(), [*alone.parameters()])])
        everyone = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(everyone, mine)
        before = counted("mixle:torch-ddp:")
        reduction.module(inputs).float().sum().backward()
        reduced = reduction.finish(1 if reduction.mesh.rank == 0 else 0)  # one token in all, so nothing is scaled
        got = torch.cat([reduced.gradients[name].flatten() for name, _ in model.named_parameters()])
        exact = torch.stack(everyone).double().sum(0).bfloat16()
        in_bf16 = sum(everyone[1:], everyone[0])
        sent = since(before, "mixle:torch-ddp:")["allreduce"]
        found.append((sent, *(float((sums == exact).float().mean()) for sums in (got, in_bf16))))
        reduction.zero()
    return found, (1, 4 * mine.numel())


def test_half_precision_gradients_travel_as_fp32_and_are_rounded_once(ranks):
    """The first update sums after the backward, the others in the buckets' hook."""
    for outcome in ranks(half_precision, 4):
        found, wanted = outcome.value
        for sent, exact, exact_in_bf16 in found:
            assert sent == wanted
            assert exact == 1.0
            assert exact_in_bf16 < 0.95, "a sum in bf16 gives other numbers, or this test would show nothing"

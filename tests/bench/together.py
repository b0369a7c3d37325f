"""All contenders of a layout in the same ranks, timed alternately."""

from __future__ import annotations

import functools
import gc
import time
from typing import Any

import contenders
import torch
import torch.distributed as dist
from alone import BY_NAME, start
from cost import count

import mixle_core as mx


def together(
    names: list[str], size: str, plan: mx.ParallelPlan, folder: str, rounds: int, steps: int, warm: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds per step of each contender in each round, by the clock and of this rank's processor time.

    Before that come `warm` steps, in which DistributedDataParallel rebuilds its buckets.

    A round goes there and back (A B C C B A), so that drift within it falls out of the ratios; the next one starts with another contender.
    """
    start(plan)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-5, fused=True)
    job = contenders.Job(size, plan, adamw, folder=folder)
    built = {name: BY_NAME[name](job) for name in names}
    batches = [job.batches(number) for number in range(steps)]
    for contender in built.values():
        for _ in range(warm):
            contender.step(batches[0])
    seconds: dict[str, dict[str, list[float]]] = {name: {"clock": [], "processor": []} for name in names}
    gc.collect()
    for number in range(rounds):
        order = [*names[number % len(names) :], *names[: number % len(names)]]
        there = {name: _timed(built[name], batches, name) for name in order}
        back = {name: _timed(built[name], batches, name) for name in reversed(order)}
        for name in names:
            for clock, one, other in zip(seconds[name].values(), there[name], back[name], strict=True):
                clock.append((one + other) / (2 * steps))
    return seconds


def _timed(contender: Any, batches: list[list[torch.Tensor]], name: str) -> tuple[float, float]:
    count(name == "Mixle")  # only mixle pays for its count, which otherwise is there for the whole process
    dist.barrier()
    started, spent = time.perf_counter(), time.process_time()
    for ids in batches:
        contender.step(ids)
    dist.barrier()
    return time.perf_counter() - started, time.process_time() - spent

"""What mixle's own checks take: the ledger, the probe, and the count of collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mixle_core.ledger import Ledger
from mixle_core.runtime.groups import _counter
from mixle_core.runtime.probe import Probe

WATCHED = {"ledger": ((Ledger, "record"), (Ledger, "close")), "probe": ((Probe, "observe"), (Probe, "require"), (Probe, "judge"))}


class Watch:
    """Seconds that every update so far spent in the ledger and in the probe; watches from now on."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(WATCHED, 0.0)
        for what, places in WATCHED.items():
            for owner, method in places:
                setattr(owner, method, self._wrap(what, getattr(owner, method)))

    def _wrap(self, what: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[what] += time.perf_counter() - started

        return timed

    def take(self) -> dict[str, float]:
        """Seconds since the last look."""
        taken, self.seconds = self.seconds, dict.fromkeys(WATCHED, 0.0)
        return taken


def updates(contender: Any, batches: list[torch.Tensor], watch: Watch, number: int) -> dict[str, float]:
    """Medians over `number` updates: the whole step and the ledger; the probe has ended with the first update."""
    seconds: dict[str, list[float]] = {"step": [], **{what: [] for what in WATCHED}}
    watch.take()
    for _ in range(number):
        dist.barrier()
        started = time.perf_counter()
        contender.step(batches)
        seconds["step"].append(time.perf_counter() - started)
        for what, value in watch.take().items():
            seconds[what].append(value)
    return {what: statistics.median(values) for what, values in seconds.items()}


def per_collective(calls: int = 400, rounds: int = 9) -> float:
    """Seconds of this thread that counting adds to one collective, from a group of one rank, where nothing is sent."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(8)

    def each() -> float:
        found = []
        for _ in range(rounds):
            started = time.thread_time()
            for _ in range(calls):
                dist.all_reduce(values)
            found.append((time.thread_time() - started) / calls)
        return min(found)

    each()
    plain = each()
    _counter.install()
    return each() - plain

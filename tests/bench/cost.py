"""What mixle's own checks take: the ledger, the probe, and the count of collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mixle_core.ledger import Ledger
from mixle_core.runtime import _upstream, groups
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


def count(on: bool) -> None:
    """Let mixle count the collectives of this process, or not; by itself it never stops once it began."""
    if on and not _upstream._libraries:
        _upstream.observe_collectives(groups._counter._observe)
    while not on and _upstream._libraries:
        _upstream._libraries.pop()._destroy()


def per_collective(calls: int = 200, rounds: int = 25) -> float:
    """Seconds that counting adds to one collective, from torch's fake group, which sends nothing; the quickest rounds compared."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    values = torch.ones(8)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for on, found in seconds.items():
            count(on)
            started = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(values)
            found.append((time.perf_counter() - started) / calls)
    return min(seconds[True]) - min(seconds[False])

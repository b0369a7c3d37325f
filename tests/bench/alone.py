"""One contender in a fresh launch of its own: is it right, what does it send, how much memory does it take."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import contenders
import cost
import libraries
import qwen
import torch
import torch.distributed as dist
from traffic import Counter

import mixle_core as mx

MIB = 2**20
RATE = 1024.0
"""A power of two, large enough that a parameter's own value takes no digit of the gradient that is read off its step."""

BY_NAME = {
    kind.__name__: kind
    for kind in (
        contenders.Mixle,
        contenders.HandDDP,
        contenders.HandFSDP,
        contenders.HandTP,
        libraries.TorchReplicate,
        libraries.TorchFSDP,
        libraries.Transformers,
        libraries.Fabric,
        libraries.Accelerate,
    )
}


def start(plan: mx.ParallelPlan) -> None:
    """To be called first on every rank."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how whole tensors are put together here is no advice to give
    contenders.sizes(plan)
    libraries.launched_as(dist.get_rank(), dist.get_world_size())


def alone(name: str, size: str, plan: mx.ParallelPlan, folder: str, quick: bool) -> dict[str, Any]:
    """Errors against one process, counted traffic of one update, peak memory; or the error that it cannot be built with."""
    start(plan)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-5, fused=True)
    job = contenders.Job(size, plan, adamw, folder=folder)
    if name == "Transformers":  # its weights come from a directory, and writing that is no part of its memory
        libraries.write_weights(job)
    watch = cost.Watch() if name == "Mixle" else None
    before = _anonymous()
    try:
        with _Highest() as highest:
            contender = BY_NAME[name](job)
    except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    batches = job.batches(0)
    contender.step(batches)
    found: dict[str, Any] = {"first": watch.take()} if watch else {}
    for _ in range(1 if quick else 3):
        contender.step(batches)
    _reset_peak()
    for _ in range(1 if quick else 3):
        contender.step(batches)
    found |= {"set_up_mib": (highest.bytes - before) / MIB, "steps_mib": (_peak() - before) / MIB}
    found["tensors_mib"] = _tensors(lambda: contender.step(batches), Path(folder) / f"trace-{dist.get_rank()}.json") / MIB
    if watch:
        found["later"] = cost.updates(contender, batches, watch, 3 if quick else 25)
    found["traffic"] = Counter(plan).count(lambda: contender.step(batches))
    contender.close()
    found["errors"] = {number: _error(name, size, plan, folder, number) for number in ((1,) if quick else (1, 2))}
    return found


def _error(name: str, size: str, plan: mx.ParallelPlan, folder: str, accumulation: int) -> tuple[float, str]:
    """The largest relative error of a gradient or of their norm, and whose, seen through one step of SGD after two warm ones."""
    sgd = functools.partial(torch.optim.SGD, lr=RATE)
    job = contenders.Job(size, plan, sgd, max_norm=1e9, accumulation=accumulation, folder=folder)
    contender = BY_NAME[name](job)
    groups = [group for optimizer in contender.optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = 0.0
    for number in range(2):
        contender.step(job.batches(number * accumulation))
    for group in groups:
        group["lr"] = RATE
    before = contender.parameters()
    contender.step(job.batches(7))
    after = contender.parameters()
    contender.close()
    reference = qwen.reference_gradients(size, list(range(7, 7 + accumulation)), plan.data_size)
    errors = {key: float(((before[key] - after[key]) / RATE - value).norm() / value.norm()) for key, value in reference.items()}
    norm = float(torch.nn.utils.get_total_norm(list(reference.values())))
    errors["the global norm"] = abs(contender.norm - norm) / norm
    worst = max(errors, key=lambda key: errors[key])
    return errors[worst], worst


def _tensors(step: Callable[[], None], trace: Path) -> int:
    """The most that torch has allocated at once within `step`, above its beginning."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    sizes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(sizes, initial=0))


def _status() -> dict[str, int]:
    """Sizes of this process, in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


def _anonymous() -> int:
    """Anonymous memory in use, after what was freed went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status()["RssAnon"]


class _Highest:
    """Looks every millisecond at the anonymous memory while it is entered: there, files are mapped in the meantime."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, _status()["RssAnon"])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def _peak() -> int:
    """Largest anonymous memory since `_reset_peak`, where no file is mapped any more: code is, when it is first run."""
    status = _status()
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]


def _reset_peak() -> None:
    _anonymous()
    Path("/proc/self/clear_refs").write_text("5")

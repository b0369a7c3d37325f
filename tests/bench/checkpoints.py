"""Saving and loading 200 MiB of sharded state, beside torch's distributed checkpoint, alternately on the same ranks."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from mixle_core.runtime import SaveHandle, load_training_state, save_training_state

GOALS = {"save": 1.1, "load, warm": 1.5, "load, cold": 1.1, "async save, until it returns": 0.2}
"""Of what each takes at most: of torch's, and the last of the sync save."""

_LAYERS = 8


def state_of(mib: float) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A sharded model with AdamW's state, `mib` MiB in all over the ranks, and the same tensors by name for torch."""
    side = max(16, int((mib * 2**20 / 4 / 3 / _LAYERS) ** 0.5) // 8 * 8)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(_LAYERS)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        named |= {f"{name}.{kind}": optimizer.state[parameter][kind] for kind in ("exp_avg", "exp_avg_sq")}
    return model, optimizer, named


def timed(work: Callable[[], Any]) -> float:
    """Seconds between two barriers."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def forget(folder: Path) -> None:
    """Let the kernel drop what it has of the files in memory; the first rank does it."""
    if dist.get_rank() == 0:
        for file in folder.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


class Peak:
    """The most anonymous memory of the process within a block, above what it had at its beginning; sampled."""

    def __enter__(self) -> Self:
        self._before, self._most, self._over = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, _anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.mib = max(0, self._most - self._before) / 2**20


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measured(folder: str, mib: float, rounds: int) -> dict[str, Any]:
    """Seconds of each round by what was done, and the memory beyond the state in MiB."""
    torch.set_num_threads(1)
    model, optimizer, named = state_of(mib)
    place = Path(folder)
    found: dict[str, list[float]] = {}
    held = sum(t.to_local().numel() * t.element_size() for t in named.values()) / 2**20

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    def ours(step: int, **options: Any) -> Any:
        return save_training_state(model, optimizer, place / "ours", step=step, **options)

    def round_of(number: int) -> None:
        theirs = place / f"theirs{number}"
        pairs = [
            ("mixle: save", lambda: ours(2 * number)),
            ("torch: save", lambda: dcp.save(named, checkpoint_id=theirs)),
        ]
        for what, work in pairs if number % 2 else pairs[::-1]:
            note(what, timed(work))
        path = place / "ours" / f"step-{2 * number:08d}"
        loads = [
            ("mixle: load", lambda: load_training_state(model, optimizer, path), path),
            ("torch: load", lambda: dcp.load(named, checkpoint_id=theirs), theirs),
        ]
        for what, work, files in loads if number % 2 else loads[::-1]:
            note(f"{what}, warm", timed(work))
            forget(files)
            note(f"{what}, cold", timed(work))
        dist.barrier()
        started = time.perf_counter()
        handle = ours(2 * number + 1, asynchronous=True)
        note("mixle: async save, until it returns", time.perf_counter() - started)
        assert isinstance(handle, SaveHandle)
        handle.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            for used in (theirs, path, place / "ours" / f"step-{2 * number + 1:08d}"):
                shutil.rmtree(used)
        dist.barrier()

    round_of(0)  # buffers of the asynchronous save, the process group, imports
    found.clear()
    for number in range(1, rounds + 1):
        round_of(number)
    memory = {}
    with Peak() as peak:
        ours(2 * rounds + 2)
    memory["save"] = peak.mib
    with Peak() as peak:
        load_training_state(model, optimizer, place / "ours" / f"step-{2 * rounds + 2:08d}")
    memory["load"] = peak.mib
    return {"seconds": found, "memory": memory, "held_mib": held}

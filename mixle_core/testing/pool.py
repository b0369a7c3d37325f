"""Run a function on several real processes. A fork server imports torch once per test session; ranks are forks of it."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext
from typing import Any

import attrs

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "mixle_core.runtime",
    "mixle_core.audit",
)
"""What the fork server imports ahead; `preload` adds to it."""

_more: list[str] = []

_GRACE_S = 1.0
"""A rank that is done waits so long for the others: gloo may fail their last collective when its connections close at once."""


@attrs.frozen
class Outcome:
    """What one rank ended with: a value, or the type name, text and traceback of its error, or only an exit code."""

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


def preload(*modules: str) -> None:
    """Let the fork server import further modules ahead, such as a library of models; call it before the first `run_ranks`.

    A module that is not there is passed over. It changes how long ranks take to start, and nothing else.
    """
    _more.extend(module for module in modules if module not in _more)


@functools.cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *_more])
    return context


def _reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Where a function is found again in another process: its module may have been imported from a file by a test runner."""
    module = inspect.getmodule(function)
    assert module is not None and module.__file__ is not None, f"{function} must be defined in a file"
    return module.__name__, module.__file__, function.__qualname__


def _resolve(name: str, file: str, qualname: str) -> Callable[..., Any]:
    module = sys.modules.get(name)
    if module is None:
        try:
            module = importlib.import_module(name)
        except ImportError:
            module = None
    if module is None or getattr(module, "__file__", None) != file:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _main(rank: int, world_size: int, store: str, timeout_s: float, env: Mapping[str, str], pipe: Any, function: Any, args: Any) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        if world_size > 1:
            limit = datetime.timedelta(seconds=timeout_s)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
        outcome = Outcome(rank, value=_resolve(*function)(*args), seconds=time.monotonic() - started)
        sent = pickle.dumps(outcome)  # not multiprocessing's way, which lends tensors from a process that is about to end
    except BaseException as error:
        outcome = Outcome(rank, None, type(error).__name__, str(error), traceback.format_exc(), None, time.monotonic() - started)
        sent = pickle.dumps(outcome)
    pipe.send_bytes(sent)
    pipe.poll(_GRACE_S)  # ready when the other side closes: all ranks are done
    os._exit(0 if outcome.error is None else 1)  # gloo threads of a failed rank would hold an orderly exit up


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    group_timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[Outcome]:
    """Call `function(*args)` on `world_size` gloo ranks and return their outcomes, by rank.

    Args:
        function: defined at the top of a module; with several ranks the default process group exists when it is called.
        timeout_s: of the whole run; ranks still running then are ended and their outcome has exit code None.
        group_timeout_s: of the default process group's collectives.
        env: further environment variables of the ranks, beside those of the caller.
        check: raise AssertionError with the first failing rank's traceback.
    """
    context = _fork_server()
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        ranks = []
        for rank in range(world_size):
            receiver, sender = context.Pipe()
            call = (rank, world_size, store, group_timeout_s, {**os.environ, **(env or {})}, sender, _reference(function), args)
            process = context.Process(target=_main, args=call, daemon=True)
            process.start()
            sender.close()
            ranks.append((process, receiver))
        outcomes = _collect(ranks, time.monotonic() + timeout_s)
    if check:
        failed = [o for o in outcomes if o.error is not None or o.exitcode != 0]
        if failed:
            worst = min(failed, key=lambda o: (o.error is None, o.seconds))
            raise AssertionError(
                f"rank {worst.rank} of {world_size} failed (exit code {worst.exitcode}): {worst.error}: {worst.message}\n{worst.trace}"
            )
    return outcomes


def _collect(ranks: list[tuple[Any, Any]], deadline: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting: dict[Any, int] = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    while waiting and time.monotonic() < deadline:
        for found in multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
            receiver: Any = found
            rank = waiting.pop(receiver)
            try:
                outcomes[rank] = pickle.loads(receiver.recv_bytes())  # noqa: S301 - of a process started here
            except EOFError:  # the process died without a word
                outcomes[rank] = Outcome(rank)
    for _, receiver in ranks:
        receiver.close()
    for rank, (process, _) in enumerate(ranks):
        process.join(timeout=5.0 if rank in outcomes else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
            outcomes.setdefault(rank, Outcome(rank, error="Timeout", message="still running at the end of the time allowed"))
        else:
            outcomes[rank] = attrs.evolve(outcomes.get(rank, Outcome(rank)), exitcode=process.exitcode)
    return [outcomes[rank] for rank in range(len(ranks))]

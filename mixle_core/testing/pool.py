"""Run a function on several real processes. A fork server imports torch once per test session; ranks are forks of it."""

from __future__ import annotations

import contextlib
import functools
import gc
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
from typing import Any, ClassVar

import attrs

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "mixle_core.runtime",
    "mixle_core.audit.verification",
    "mixle_core.testing",
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


@attrs.frozen
class _Call:
    """What the ranks of a launch are to do next; `stays` says whether they wait for another call afterwards."""

    function: tuple[str, str, str]
    args: bytes
    env: Mapping[str, str]
    stays: bool


def _main(rank: int, world_size: int, store: str, timeout_s: float, pipe: Any) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    gc.freeze()  # what was imported stays: no collection needs to look at it again
    torch.set_num_threads(1)
    random = torch.get_rng_state()
    while True:
        try:
            call: _Call = pickle.loads(pipe.recv_bytes())  # noqa: S301 - of the process that started this one
        except EOFError:  # no further call
            os._exit(0)
        os.environ.clear()
        os.environ.update(call.env)
        torch.set_rng_state(random)  # each call finds what a new process would
        started = time.monotonic()
        try:
            if world_size > 1 and not dist.is_initialized():
                limit = datetime.timedelta(seconds=timeout_s)
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
            function = _resolve(*call.function)
            value = function(*pickle.loads(call.args))  # noqa: S301 - as above
            outcome = Outcome(rank, value=value, seconds=time.monotonic() - started)
            del value
            sent = pickle.dumps(outcome)  # not multiprocessing's way, which lends tensors from a process that is about to end
        except BaseException as error:
            outcome = Outcome(rank, None, type(error).__name__, str(error), traceback.format_exc(), None, time.monotonic() - started)
            sent = pickle.dumps(outcome)
        pipe.send_bytes(sent)
        if outcome.error is not None or not call.stays:
            break
        del outcome, sent
        gc.collect()  # models of this call and their hooks, while the other ranks end theirs
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
    reuse: bool = False,
) -> list[Outcome]:
    """Call `function(*args)` on `world_size` gloo ranks and return their outcomes, by rank.

    Args:
        function: defined at the top of a module; with several ranks the default process group exists when it is called.
        timeout_s: of the whole run; ranks still running then are ended and their outcome has exit code None.
        group_timeout_s: of the default process group's collectives.
        env: further environment variables of the ranks, beside those of the caller.
        check: raise AssertionError with the first failing rank's traceback.
        reuse: let the ranks of the last such run do it, in the default process group and with the caches that they have, and
            leave them for the next one; for functions that change nothing else in their process. Ranks of a run that fails end.
    """
    call = _Call(_reference(function), pickle.dumps(args), {**os.environ, **(env or {})}, reuse)
    launch = _Launch.kept.pop((world_size, group_timeout_s), None) if reuse else None
    outcomes = (launch or _Launch(world_size, group_timeout_s)).call(call, timeout_s)
    if check:
        failed = [o for o in outcomes if o.error is not None or o.exitcode != 0]
        if failed:
            worst = min(failed, key=lambda o: (o.error is None, o.seconds))
            raise AssertionError(
                f"rank {worst.rank} of {world_size} failed (exit code {worst.exitcode}): {worst.error}: {worst.message}\n{worst.trace}"
            )
    return outcomes


class _Launch:
    """Ranks that were started together, each with its end of a pipe."""

    kept: ClassVar[dict[tuple[int, float], _Launch]] = {}
    """Those that wait for another call, by number of ranks and time limit of their group."""

    def __init__(self, world_size: int, group_timeout_s: float) -> None:
        context = _fork_server()
        self._key = world_size, group_timeout_s
        self._folder = tempfile.TemporaryDirectory()
        self._ranks: list[tuple[Any, Any]] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            call = (rank, world_size, f"{self._folder.name}/store", group_timeout_s, theirs)
            process = context.Process(target=_main, args=call, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def call(self, call: _Call, timeout_s: float) -> list[Outcome]:
        """Outcomes by rank; afterwards the ranks have ended or are kept."""
        deadline = time.monotonic() + timeout_s
        sent = pickle.dumps(call)
        for _, pipe in self._ranks:
            with contextlib.suppress(OSError):  # a rank that ended meanwhile has no outcome
                pipe.send_bytes(sent)
        outcomes: dict[int, Outcome] = {}
        heard: set[int] = set()
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting and time.monotonic() < deadline:
            for found in multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                receiver: Any = found
                rank = waiting.pop(receiver)
                try:
                    outcomes[rank] = pickle.loads(receiver.recv_bytes())  # noqa: S301 - of a process started here
                    heard.add(rank)
                except (EOFError, ConnectionError):  # the process died without a word
                    outcomes[rank] = Outcome(rank)
        if call.stays and len(heard) == len(self._ranks) and all(outcome.error is None for outcome in outcomes.values()):
            self.kept[self._key] = self
            return [attrs.evolve(outcomes[rank], exitcode=0) for rank in range(len(self._ranks))]
        return self._end(outcomes)

    def _end(self, outcomes: dict[int, Outcome]) -> list[Outcome]:
        for _, pipe in self._ranks:
            pipe.close()
        for rank, (process, _) in enumerate(self._ranks):
            process.join(timeout=5.0 if rank in outcomes else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
                outcomes.setdefault(rank, Outcome(rank, error="Timeout", message="still running at the end of the time allowed"))
            else:
                outcomes[rank] = attrs.evolve(outcomes.get(rank, Outcome(rank)), exitcode=process.exitcode)
        self._folder.cleanup()
        return [outcomes[rank] for rank in range(len(self._ranks))]

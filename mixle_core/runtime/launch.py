"""Start the ranks of a plan on this machine through torch's elastic agent, and bring one failing rank's words back."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where a rank of the elastic agent leaves its error; the agent names it in the rank's environment."""


@attrs.frozen
class LaunchResult:
    """How the ranks ended: 0 or the first failing rank's exit code, and its line."""

    exit_code: int
    message: str = ""
    rank: int | None = None


def is_rank() -> bool:
    """Whether this process is a rank that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], num_ranks: int, *, env: Mapping[str, str] | None = None) -> LaunchResult:
    """Run `python ARGUMENTS` as `num_ranks` ranks on this machine and wait for them.

    When one rank fails the agent ends the others. The rendezvous takes a free port.
    """
    # the agent reports a failing rank in a dozen lines of log; what the rank said is reported by the caller in one
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    before = dict(os.environ)  # the ranks get this process's environment
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ.update(env or {})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return _first_words(error)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return LaunchResult(0)


def _first_words(error: ChildFailedError) -> LaunchResult:
    """The failure that explains the others: an error that a rank wrote down before one that only ended."""
    said = {}
    for rank, failure in error.failures.items():
        text = _message(failure.error_file)
        if text:
            said[rank] = (failure.exitcode, text)
    if said:
        # ranks that lost their peer say so later, and in torch's words; the exit code for bad input marks the cause
        rank = min(said, key=lambda r: (said[r][0] != 2, said[r][1].startswith("RuntimeError"), r))
        return LaunchResult(said[rank][0] if said[rank][0] > 0 else 1, said[rank][1], rank)
    rank, first = error.get_first_failure()
    if first.exitcode == 1:  # without a word: what the command found wrong, it has shown itself
        return LaunchResult(1)
    how = f"signal {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    return LaunchResult(first.exitcode if first.exitcode > 0 else 1, f"rank {rank} ended with {how}", rank)


def _message(path: str | None) -> str:
    if not path or not Path(path).is_file():
        return ""
    try:
        content = json.loads(Path(path).read_text())["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return ""
    return str(content.get("message", "")) if isinstance(content, dict) else str(content)


def leave_error(text: str) -> bool:
    """Write this rank's error where the agent's parent finds it; False when no agent started this process."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return False
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}))
    return True


def limit_threads() -> None:
    """Give each rank on this machine its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

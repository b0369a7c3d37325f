"""Ranks that save or load together: they wait for each other for a short time only, and learn what failed on any."""

from __future__ import annotations

import collections
import datetime
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mixle_core.checkpoint import CheckpointError
from mixle_core.errors import MixleError
from mixle_core.runtime import groups
from mixle_core.runtime._upstream import default_store

ARRIVE_WITHIN_S = 20.0
"""A rank that calls save or load waits so long for the others to call it, too."""

_calls: collections.Counter[str] = collections.Counter()


class Meeting:
    """The ranks of one save or load, on a process group of their own (gloo, with the plan's timeout).

    Args:
        what: the call, for messages, such as "save of step 12".
        timeout_s: of its collectives.
        wait_s: for ranks that do not call at all.

    Raises:
        CheckpointError: on the ranks that called, when others do not within `wait_s`.
    """

    def __init__(self, what: str, *, timeout_s: float, wait_s: float = ARRIVE_WITHIN_S) -> None:
        self.what = what
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._group: dist.ProcessGroup | None = None
        if self.size > 1:
            _arrive(what, self.rank, self.size, min(wait_s, timeout_s))
            try:
                self._group = groups.gloo_group("checkpoint", timeout_s)
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(self._lost(_first_line(error))) from error

    def gather(self, value: Any) -> list[Any] | None:
        """`value` of every rank on the first; None on the others."""
        if self.size == 1:
            return [value]
        everyone: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._do(lambda: dist.gather_object(value, everyone, group=self._group, group_dst=0))
        return everyone

    def scatter(self, values: list[Any] | None) -> Any:
        """This rank's element of what the first rank has."""
        if self.size == 1:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        self._do(lambda: dist.scatter_object_list(mine, values, group=self._group, group_src=0))
        return mine[0]

    def share(self, value: Any) -> Any:
        """What the first rank has."""
        return self.scatter([value] * self.size if self.rank == 0 else None)

    def largest(self, number: int) -> int:
        """The largest `number` of any rank, on every rank."""
        everyone = self.gather(number)
        found: int = self.share(None if everyone is None else max(everyone))
        return found

    def settle(self, failure: Exception | None) -> None:
        """Raise on every rank what failed on any; each rank calls it at the same point.

        Raises:
            CheckpointError: naming the rank.
        """
        failures = self.gather(None if failure is None else as_error(failure))
        text = first_failure(failures) if failures is not None else None
        found = self.share(text)
        if found is not None:
            raise found if failure is None or self.size > 1 else as_error(failure)

    def _do(self, collective: Callable[[], Any]) -> None:
        text = self._failed(collective)
        if text is not None:
            self._leave()
            raise CheckpointError(self._lost(text))

    def _lost(self, text: str) -> str:
        return (
            f"{self.what}: rank {self.rank} lost another rank, which ended or stopped ({text}); expected all ranks to the end; way out: "
            "start the ranks anew; what was committed before loads"
        )

    def _failed(self, collective: Callable[[], Any]) -> str | None:
        """What a collective failed with, as text: the error itself holds on to the group."""
        if self._group is None:
            return "it was lost before"
        try:
            collective()
        except (RuntimeError, ValueError) as error:
            return _first_line(error)
        return None

    def _leave(self) -> None:
        """Close the connections, so that ranks that wait for this one learn at once that nothing comes, wherever they wait."""
        group, self._group = self._group, None
        if group is not None:
            for key in [key for key, known in groups._groups.items() if known is group]:
                del groups._groups[key]
            dist.destroy_process_group(group)


def _arrive(what: str, rank: int, size: int, wait_s: float) -> None:
    """Wait until all ranks call; through the store, since a rank that calls alone would hang in any collective."""
    store = default_store()
    _calls[what] += 1
    keys = [f"mixle/meet/{what}/{_calls[what]}/{other}" for other in range(size)]
    deadline = time.monotonic() + wait_s
    try:
        store.set(keys[rank], b"here")
        store.wait(keys, datetime.timedelta(seconds=wait_s))
        return
    except (RuntimeError, ValueError) as error:
        text = _first_line(error)
    try:
        if time.monotonic() < deadline - 1.0:
            raise CheckpointError(f"{what}: the ranks cannot reach each other: {text}; way out: start the ranks anew")
        late = [str(other) for other in range(size) if not store.check([keys[other]])]
        store.delete_key(keys[rank])  # else a rank that comes later would find this one here, and wait in a collective
        _calls[what] -= 1
    except RuntimeError as error:  # the store went with the process that held it
        raise CheckpointError(f"{what}: the ranks cannot reach each other: {_first_line(error)}; way out: start the ranks anew") from error
    raise CheckpointError(
        f"{what}: rank{'s' * (len(late) > 1)} {', '.join(late[:8])} did not call it within {wait_s:.0f} s; every rank calls it, also those "
        "that write nothing"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def as_error(failure: BaseException) -> CheckpointError:
    """A failure as an error of plain text, which crosses processes whatever it was."""
    if type(failure) is CheckpointError:
        return failure
    try:
        text = str(failure)
    except Exception as error:
        text = f"its text cannot be had: {type(error).__name__}"
    if isinstance(failure, CheckpointError):
        return CheckpointError(text, path=str(failure.path), errno=str(failure.errno), rank=str(failure.rank))
    return CheckpointError(text if isinstance(failure, MixleError) else f"{type(failure).__name__}: {text}")


def first_failure(failures: list[CheckpointError | None]) -> CheckpointError | None:
    """The failure of the first rank that has one, with its number."""
    found = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if not found:
        return None
    rank, failure = found[0]
    return failure.on_rank(rank) if len(failures) > 1 and not failure.rank else failure

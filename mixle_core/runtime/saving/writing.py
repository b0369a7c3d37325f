"""One save: the ranks' blocks are compared, shared out, written beside each other, and committed by the first rank."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch

from mixle_core.checkpoint import CheckpointError, Piece, Record, begin, commit, data_file, discard, opaque, prune, survey, write_data
from mixle_core.checkpoint.values import dump_json, encode
from mixle_core.runtime.saving.meeting import Meeting, as_error, first_failure
from mixle_core.runtime.saving.plain import digest
from mixle_core.runtime.saving.snapshot import BUFFER, Item, Snapshot, own_buffer

Hook = Callable[[str, int], None]
"""Called with "data", "metadata", "success" or "rename", and the rank, when that is done: for tests."""


@attrs.frozen(eq=False)
class Request:
    """Where and as what a snapshot is saved.

    Args:
        root: directory of the run; equal on every rank.
        keep: how many steps stay after the commit; None for all.
        merge: makes the values of the checkpoint of the values of all ranks.
        versions: of packages.
    """

    root: str
    step: int
    checksum: str
    keep: int | None
    merge: Callable[[Sequence[Snapshot]], Mapping[str, Any]]
    versions: Mapping[str, str]
    hook: Hook | None = None


_log = structlog.get_logger("mixle.checkpoint")

_Share = tuple[int, bool]
"""Place of a block among a rank's items, and whether it is written as the rank's own."""


@attrs.frozen
class _Offer:
    """A block that a rank holds: what tells it from others, its dtype and bytes, and a digest where others may hold it too."""

    block: tuple[Any, ...]
    dtype: str
    num_bytes: int
    digest: int | None


def save_together(meeting: Meeting, request: Request, prepare: Callable[[], Snapshot]) -> Path:
    """Write and commit. Collective; every rank returns the committed directory, or raises what failed on any.

    Args:
        prepare: gives this rank's snapshot; what fails in it fails everywhere.

    Raises:
        CheckpointError: nothing is committed, and earlier steps are as they were.
    """
    snapshot, failure = _attempt(prepare)
    offers: list[_Offer] = []
    plain: Snapshot | None = None
    if snapshot is not None:
        described, failure = _attempt(lambda: _described(snapshot))
        if described is not None:
            offers, plain = described
    told = meeting.gather((failure, offers, plain))
    part: Path | None = None
    values: Mapping[str, Any] = {}
    orders: list[Any] | None = None
    if told is not None:
        planned, failure = _attempt(lambda: _planned(request, told))
        if planned is not None:
            part, values, shares = planned
            orders = [(None, str(part), share) for share in shares]
        else:
            orders = [(_placed(failure, meeting), None, ())] * meeting.size
    try:
        failure, place, share = meeting.scatter(orders)
        if failure is not None:
            raise failure
        assert snapshot is not None
        records, failure = _attempt(lambda: _write(request, Path(place), meeting.rank, snapshot.items, share))
        written = meeting.gather((failure, records))
        outcome: Any = None
        if written is not None:
            assert part is not None
            outcome, failure = _attempt(lambda: _commit(request, part, values, written))
        outcome = meeting.share(outcome if failure is None else _placed(failure, meeting))
        if isinstance(outcome, CheckpointError):
            raise outcome
    except CheckpointError:
        if part is not None:  # on the first rank, also when it lost another; once it is renamed there is nothing of that name
            _attempt(lambda: discard(part))
        raise
    return Path(outcome)


def _attempt(step: Callable[[], Any]) -> tuple[Any, CheckpointError | None]:
    try:
        return step(), None
    except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
        return None, as_error(error)


def _placed(failure: CheckpointError | None, meeting: Meeting) -> CheckpointError | None:
    """With the rank on which the operating system refused, when others hear of it."""
    return failure.on_rank(meeting.rank) if failure is not None and failure.errno and not failure.rank and meeting.size > 1 else failure


def _described(snapshot: Snapshot) -> tuple[list[_Offer], Snapshot]:
    """What the first rank needs to know: the blocks without their values, and the plain values, checked to be storable."""
    for kind in (snapshot.shared, snapshot.own):
        for key, value in kind.items():
            encode(value, key)
    offers = [_offer(item) for item in snapshot.items]
    return offers, attrs.evolve(snapshot, items=())


def _offer(item: Item) -> _Offer:
    piece, tensor = item.piece, item.piece.tensor
    assert isinstance(tensor, torch.Tensor)  # functions are for those who write without ranks
    block = (piece.name, piece.kind, piece.shape, piece.offset, tuple(tensor.shape))
    size = tensor.numel() * tensor.element_size()
    return _Offer(block, str(tensor.dtype), size, digest(tensor) if item.copied else None)


def _planned(
    request: Request, told: Sequence[tuple[CheckpointError | None, list[_Offer], Snapshot | None]]
) -> tuple[Path, Any, list[list[_Share]]]:
    """The attempt's directory, the values, and for each rank the blocks that it writes."""
    failed = first_failure([failure for failure, _, _ in told])
    if failed is not None:
        raise failed
    shares = _shared_out([offers for _, offers, _ in told])
    values = request.merge([plain for _, _, plain in told if plain is not None])
    _make_room(request)
    return begin(request.root, request.step), values, shares


def _make_room(request: Request) -> None:
    """Steps of one run follow each other: the newest is what a load takes, and what is kept. A damaged one steps aside.

    Raises:
        CheckpointError: a later step is committed already.
    """
    place = Path(request.root)
    found = survey(place) if place.is_dir() else ()
    later = [entry.step for entry in found if entry.problem is None and entry.step > request.step]
    if later:
        raise CheckpointError(
            f"{place}: step {max(later)} is committed already; expected none after step {request.step}, because a load "
            "takes the newest; way "
            "out: go on from that one, or save into another directory",
            path=str(place),
        )
    for entry in found:
        if entry.problem is not None and entry.step == request.step:
            aside = entry.path.with_name(f"{entry.path.name}.damaged-{uuid.uuid4().hex[:16]}")
            entry.path.rename(aside)
            _log.warning("damaged_step_moved_aside", step=entry.step, problem=entry.problem, to=aside.name)


def _shared_out(offers: Sequence[Sequence[_Offer]]) -> list[list[_Share]]:
    """Each block to one of the ranks that hold it, so that all write about as much; buffers that differ to each of them.

    Raises:
        CheckpointError: copies that differ, naming tensor and ranks.
    """
    holders: dict[tuple[Any, ...], list[tuple[int, int, _Offer]]] = {}
    for rank, mine in enumerate(offers):
        for place, offer in enumerate(mine):
            holders.setdefault(offer.block, []).append((rank, place, offer))
    load = [0] * len(offers)
    shares: list[list[_Share]] = [[] for _ in offers]
    for block, found in sorted(holders.items(), key=lambda item: (len(item[1]), -item[1][0][2].num_bytes)):
        if block[1] == BUFFER and len({offer.digest for _, _, offer in found}) > 1:  # statistics of each rank's own rows
            for rank, place, _ in found:
                shares[rank].append((place, True))
            continue
        _require_alike(block, found)
        rank, place, offer = min(found, key=lambda held: (load[held[0]], held[0]))
        load[rank] += offer.num_bytes
        shares[rank].append((place, False))
    return [sorted(share) for share in shares]


def _require_alike(block: tuple[Any, ...], found: Sequence[tuple[int, int, _Offer]]) -> None:
    first_rank, _, first = found[0]
    for rank, _, offer in found[1:]:
        if (offer.dtype, offer.digest) != (first.dtype, first.digest):
            name, kind, *_ = block
            what = f"{first.dtype} and {offer.dtype}" if offer.dtype != first.dtype else "other values"
            raise CheckpointError(
                f"{name} ({kind or 'a tensor of its own'}) differs between rank {first_rank} and rank {rank} ({what}), "
                "which hold copies of it; "
                "expected equal bits; way out: find out who trains one of them alone (`mixle audit`), or load the last step"
            )


def _write(request: Request, part: Path, rank: int, items: Sequence[Item], share: Sequence[_Share]) -> tuple[Record, ...]:
    hook = (lambda point: request.hook(point, rank)) if request.hook is not None else None  # type: ignore[misc]
    pieces = [_piece(items[place].piece, rank) if own else items[place].piece for place, own in share]
    return write_data(part, data_file(rank, 0), pieces, checksum=request.checksum, hook=hook)


def _piece(piece: Piece, rank: int) -> Piece:
    """A buffer of this rank alone."""
    return opaque(own_buffer(piece.name, rank), piece.tensor)  # type: ignore[arg-type]


def _commit(request: Request, part: Path, values: Mapping[str, Any], written: Sequence[tuple[Any, Any]]) -> str:
    failed = first_failure([failure for failure, _ in written])
    if failed is not None:
        raise failed
    records = [record for _, mine in written for record in mine]
    hook = (lambda point: request.hook(point, 0)) if request.hook is not None else None  # type: ignore[misc]
    final = commit(part, records, values, checksum=request.checksum, versions=request.versions, hook=hook)
    if request.keep is not None:
        try:
            prune(final.parent, request.keep)  # only now: what stays is newer than what goes
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {final.name} is committed", path=error.path, errno=error.errno) from error
    return str(final)


class SaveHandle:
    """A save that goes on beside the training; `wait` for it, or training raises what failed at its next update.

    Attributes:
        step: the update after which it was taken.
    """

    def __init__(self, step: int, save: Callable[[], Path], agree: Callable[[int], int] = int) -> None:
        self.step = step
        self._path: Path | None = None
        self._failure: CheckpointError | None = None
        self._taken = False
        self._lock = threading.Lock()
        self._seen = -1  # the last update that asked and heard of no failure
        self._raise_after = -1
        self._agreed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(save, agree), name=f"mixle save of step {step}")
        self._thread.start()

    def _run(self, save: Callable[[], Path], agree: Callable[[int], int]) -> None:
        try:
            self._path = save()
        except BaseException as error:
            with self._lock:
                self._failure = as_error(error)
                seen = self._seen
            # a rank may hear of it an update before another: all raise it at the first one that none has passed
            try:
                with contextlib.suppress(Exception):  # a rank is lost: then at once
                    self._raise_after = agree(seen)
            finally:
                self._agreed.set()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """The committed directory.

        Raises:
            CheckpointError: what failed on any rank, on every rank; or it is still running after `timeout_s`.
        """
        self._thread.join(timeout_s)
        if not self.done:
            raise CheckpointError(f"save of step {self.step}: still running after {timeout_s:.0f} s; way out: wait longer")
        self._taken = True
        if self._failure is not None:
            raise self._failure
        assert self._path is not None
        return self._path

    def take_failure(self) -> CheckpointError | None:
        """What failed, if it has ended so and nobody has heard of it yet."""
        if not self.done or self._taken or self._failure is None:
            return None
        self._taken = True
        return self._failure

    def poll(self, update: int) -> CheckpointError | None:
        """What failed, if nobody has heard of it yet: on every rank at the same update.

        Args:
            update: that is about to end; each rank asks at each.
        """
        with self._lock:
            if self._failure is None:
                self._seen = update
                return None
        self._agreed.wait()
        if self._taken or update <= self._raise_after:
            return None
        self._taken = True
        return self._failure


_started: list[SaveHandle] = []


def in_background(step: int, save: Callable[[], Path], agree: Callable[[int], int]) -> SaveHandle:
    """Start a save; the one before it must have ended.

    Args:
        agree: the largest of the ranks' numbers. Collective, called in the thread of the save after it failed.
    """
    if not _started:
        atexit.register(_judge_at_exit)
    handle = SaveHandle(step, save, agree)
    _started[:] = [handle]
    return handle


def wait_for_the_last() -> None:
    """One save at a time: wait for the one that is under way, and raise what failed in it if nobody has heard of it.

    Raises:
        CheckpointError: on every rank.
    """
    if _started:
        _started[0]._thread.join()
        failure = _started[0].take_failure()
        if failure is not None:
            raise failure


def _judge_at_exit() -> None:
    """A save that failed and was never asked for must not end in success."""
    failure = _started[0].take_failure() if _started else None
    if failure is not None:
        print(f"mixle: {' '.join(str(failure).split())}", file=sys.stderr, flush=True)  # noqa: T201 - the process ends here
        sys.stdout.flush()
        os._exit(1)


def fingerprint(values: Any, where: str) -> str:
    """SHA-256 of plain values as they are stored."""
    return hashlib.sha256(dump_json(encode(values, where))).hexdigest()

"""The plain values of all ranks as those of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mixle_core.checkpoint import CheckpointError
from mixle_core.runtime.saving.snapshot import Snapshot
from mixle_core.runtime.saving.writing import fingerprint

OPTIMIZERS = "optimizers"
OPTIMIZER_VALUES = "optimizer values"
SCHEDULERS = "schedulers"
OWN = "own"
"""Key under which values lie that differ between ranks: key -> rank -> value."""


def merged(ranks: Sequence[Snapshot]) -> dict[str, Any]:
    """One dict of values: what all have alike once, optimizers as the union of what ranks hold, the rest by rank.

    Raises:
        CheckpointError: a value that should be alike and is not, with its key and two ranks.
    """
    values: dict[str, Any] = {}
    first_with: dict[str, int] = {}
    for rank, snapshot in enumerate(ranks):
        for key, value in snapshot.shared.items():
            if key == OPTIMIZERS:
                _join_optimizers(values.setdefault(key, {}), value, rank)
            elif key in (OPTIMIZER_VALUES, SCHEDULERS):
                _join_by_name(values.setdefault(key, {}), value, f"{key} of", rank)
            elif key not in values:
                values[key], first_with[key] = value, rank
            elif fingerprint(values[key], key) != fingerprint(value, key):
                raise _unlike(key, first_with[key], rank)
    own = {key for snapshot in ranks for key in snapshot.own}
    by_rank: dict[str, Any] = {}
    for key in sorted(own):
        found = {rank: snapshot.own[key] for rank, snapshot in enumerate(ranks) if key in snapshot.own}
        first = min(found)
        alike = len({fingerprint(value, key) for value in found.values()}) == 1
        by_rank[key] = {"alike": found[first], "of": first} if alike else {"by rank": found}
    return values | {OWN: by_rank}


def _join_optimizers(known: dict[str, Any], more: Mapping[str, Any], rank: int) -> None:
    for pattern, described in more.items():
        if pattern not in known:
            known[pattern] = {"class": described["class"], "groups": [dict(group) for group in described["groups"]]}
            continue
        ours, theirs = known[pattern]["groups"], described["groups"]
        for number, (group, other) in enumerate(zip(ours, theirs, strict=False)):
            if fingerprint(group["options"], pattern) != fingerprint(other["options"], pattern):
                raise _unlike(f"group {number} of optimizer {pattern!r}", 0, rank)
            group["names"] = sorted({*group["names"], *other["names"]})
        ours += [dict(group) for group in theirs[len(ours) :]]


def _join_by_name(known: dict[str, Any], more: Mapping[str, Any], what: str, rank: int) -> None:
    for name, kinds in more.items():
        if fingerprint(known.setdefault(name, kinds), name) != fingerprint(kinds, name):
            raise _unlike(f"{what} {name}", 0, rank)


def _unlike(key: str, first: int, rank: int) -> CheckpointError:
    return CheckpointError(f"{key} differs between rank {first} and rank {rank}; expected the same on every rank that has it")

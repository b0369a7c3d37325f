"""The state of learning-rate schedulers as plain values, and back, for groups that may stand in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mixle_core.checkpoint import Checkpoint, CheckpointError
from mixle_core.runtime.saving.merging import OPTIMIZERS, SCHEDULERS


def plain_state(state: Any) -> Any:
    """A scheduler's state with its kinds of dict (a Counter, for one) as plain ones, in schedulers inside it too."""
    if isinstance(state, dict):
        return {key: plain_state(value) for key, value in state.items()}
    return [plain_state(value) for value in state] if type(state) is list else state


def fill_schedulers(
    checkpoint: Checkpoint,
    schedulers: Mapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    places: Mapping[str, Sequence[int]],
) -> None:
    """Load each scheduler's state.

    Args:
        places: pattern -> for each group of the optimizer here, the place of the group that was saved.

    Raises:
        CheckpointError: a scheduler that was not saved, one that was and is not here, or another one.
    """
    saved = checkpoint.value(SCHEDULERS)
    odd = sorted((schedulers.keys() - saved.keys()) | (saved.keys() & optimizers.keys()) - schedulers.keys())
    if odd:
        what = "was not saved" if odd[0] in schedulers else "was saved, and none is given here"
        raise CheckpointError(
            f"{checkpoint.path}: scheduler {odd[0]!r} {what}; expected the schedules that were saved; way out: pass "
            "them, or go on with others: "
            'skip=("scheduler",)',
            path=str(checkpoint.path),
        )
    for pattern, scheduler in schedulers.items():
        given = scheduler.state_dict()
        unlike = sorted(saved[pattern].keys() ^ given.keys())  # it would take whatever keys it is given for its attributes
        if unlike:
            raise CheckpointError(
                f"{checkpoint.path}: scheduler {pattern!r} differs from the saved one in {unlike[0]!r} ({type(scheduler).__name__} here); "
                'expected the schedule that was saved; way out: build it as it was, or go on with another: skip=("scheduler",)',
                path=str(checkpoint.path),
            )
        number = len(checkpoint.value(OPTIMIZERS).get(pattern, {"groups": ()})["groups"])
        scheduler.load_state_dict(_as_given(_regrouped(saved[pattern], given, places.get(pattern, range(number)), number), given))


def _regrouped(saved: Any, here: Any, places: Sequence[int], number: int) -> Any:
    """What a scheduler has for each group of its optimizer, for the groups as they are here: others, or in another order."""
    if list(places) == list(range(number)):
        return saved
    if isinstance(saved, dict) and isinstance(here, dict):
        return {key: _regrouped(value, here.get(key), places, number) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(here, list):
        if len(saved) == number and len(here) == len(places):
            return [saved[place] for place in places]
        if len(saved) == len(here):
            return [_regrouped(value, other, places, number) for value, other in zip(saved, here, strict=True)]
    return saved


def _as_given(saved: Any, given: Any) -> Any:
    """`saved` with the kinds of dict that the scheduler has here."""
    if isinstance(saved, dict):
        inside = given if isinstance(given, dict) else {}
        found = {key: _as_given(value, inside.get(key)) for key, value in saved.items()}
        return type(given)(found) if isinstance(given, dict) and type(given) is not dict else found
    if isinstance(saved, list) and isinstance(given, list) and len(saved) == len(given):
        return [_as_given(value, other) for value, other in zip(saved, given, strict=True)]
    return saved

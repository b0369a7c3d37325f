"""Which optimizer of torch a state dict is of: it says its options and not its class."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mixle_core.checkpoint.errors import CheckpointError

LIKE_PARAMETERS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta", "Rprop")
"""Whose state has the shape of its parameter, or is a number."""

_OF_OTHERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
"""Options that schedulers, and parameters with names, add to any group."""


def class_of(where: str, groups: Sequence[Mapping[str, Any]], given: str | None) -> str:
    """The name of the class: as given, or the one of torch.optim that has these options.

    Raises:
        CheckpointError: none, or several.
    """
    options = {key for group in groups for key in group} - _OF_OTHERS
    known = {name: set(group) for name, group in _defaults().items()}
    if given is not None:
        odd = sorted(options - known.get(given, options))
        if odd:
            raise CheckpointError(
                f"{where}: its optimizer has the option {odd[0]!r}, which {given} has not; expected its own class; way out: name it",
                path=where,
            )
        return given
    found = [name for name, keys in known.items() if keys == options]
    if set(found) == {"Adam", "AdamW"}:
        decoupled = {bool(group.get("decoupled_weight_decay")) for group in groups}
        found = ["AdamW" if found_decoupled else "Adam" for found_decoupled in decoupled]
    if len(found) != 1:
        what = f"its options are {', '.join(sorted(options)) or 'none'}"
        raise CheckpointError(
            f"{where}: nobody says which optimizer it is of ({what}); expected those of one class of torch.optim; way out: name the class "
            "(optimizer=, or --optimizer AdamW)",
            path=where,
        )
    return found[0]


def completed(chosen: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a group, with what this torch has more, as its own loading fills it in."""
    fresh = _defaults().get(chosen, {})
    return options | {key: value for key, value in fresh.items() if key not in options}


@functools.cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Name of a class of torch.optim -> the options that a group of it has when they are not named."""
    found = {}
    for name, kind in vars(torch.optim).items():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            try:
                made: Any = kind([torch.nn.Parameter(torch.zeros(1, 1))])  # type: ignore[call-arg]
            except (TypeError, ValueError, RuntimeError):
                continue
            found[name] = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    return found

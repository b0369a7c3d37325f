"""Training state on disk, with or without a session: what is saved, and how it is put back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import structlog
import torch
import torch.distributed as dist

from mixle_core.checkpoint import Checkpoint, CheckpointError
from mixle_core.errors import UsageError
from mixle_core.runtime.reduction import Reduction
from mixle_core.runtime.saving import loading
from mixle_core.runtime.saving.generators import generator_states, restore_generators, seed_generators
from mixle_core.runtime.saving.held import persistent_buffers, reshard
from mixle_core.runtime.saving.meeting import ARRIVE_WITHIN_S, Meeting
from mixle_core.runtime.saving.merging import OPTIMIZER_VALUES, OPTIMIZERS, OWN, SCHEDULERS, merged
from mixle_core.runtime.saving.plain import copied, own_tensor
from mixle_core.runtime.saving.schedulers import fill_schedulers, plain_state
from mixle_core.runtime.saving.snapshot import (
    Item,
    Snapshot,
    buffer_items,
    opaque_items,
    optimizer_items,
    parameter_items,
    plugin_items,
    staged,
    stateful_values,
)
from mixle_core.runtime.saving.subject import Optimizers, Subject, as_mapping, subject_of, with_extra_state
from mixle_core.runtime.saving.writing import Hook, Request, SaveHandle, in_background, save_together, wait_for_the_last

_log = structlog.get_logger("mixle.checkpoint")

_UNDEFINED = "a load failed halfway, so parameters and optimizer are undefined; load a step, or start anew"

_PARTS = frozenset({"optimizer", "scheduler", "generators"})

_staging: dict[tuple[Any, ...], torch.Tensor] = {}
"""Where the values of an asynchronous save lie; one save at a time, so the next one takes the same memory."""


@attrs.frozen
class Loaded:
    """What a load found beside the state that it put back.

    Args:
        step: updates before it was saved.
        path: of the step.
        metadata: what the caller gave when saving.
        state: key -> value, of the keys asked for that have no `load_state_dict`.
        session: numbers of the session that saved.
        same_ranks: whether world and plan are those that saved; if not, random generators start anew from seed and step.
    """

    step: int
    path: Path
    metadata: Any
    state: Mapping[str, Any]
    session: Mapping[str, Any]
    same_ranks: bool


def save_training_state(
    model: Any,
    optimizer: Any,
    root: str | Path,
    *,
    step: int,
    scheduler: Any = None,
    state: Mapping[str, Any] | None = None,
    metadata: Any = None,
    session: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    checksum: str = "crc32",
    timeout_s: float = 600.0,
    seed: int = 0,
    wait_s: float = ARRIVE_WITHIN_S,
    hook: Hook | None = None,
) -> Path | SaveHandle:
    """Save the whole state of a training, exactly, as one step in `root`. Collective: every rank calls it with the same arguments.

    Args:
        model: what `attach` returned; or any module, whose DTensors are saved as they lie and whose other parameters are the same on
            every rank.
        optimizer: one, or pattern -> optimizer. Parameters that were never stepped have no state and come back so.
        root: directory of the run; the step becomes a directory in it, which is never written again.
        step: number of updates so far.
        scheduler: one learning-rate scheduler, or pattern -> scheduler.
        state: key -> anything with `state_dict()` (a loader, a gradient scaler), or plain values; it may differ between ranks.
        metadata: plain values of the caller, alike on every rank.
        session: numbers of a session, alike on every rank.
        asynchronous: return at once, with the values of now; the rest goes on in a thread.
        keep: delete all but so many steps, after this one is committed.
        checksum: of every chunk: "crc32", or "sha256".
        timeout_s: of the collectives of this save, for a model that no plan speaks for; `seed` likewise, of its random generators.
        wait_s: for ranks that do not call it.
        hook: for tests: called at each point of the commit.

    Returns:
        The step's directory; or a handle, whose `wait()` returns it.

    Raises:
        CheckpointError: on every rank, with rank and path; no step is there then, and the earlier ones are as they were.
    """
    optimizers, schedulers = as_mapping(optimizer), _schedulers(scheduler)
    if isinstance(model, Reduction):
        model.require_between_updates("save")
    wait_for_the_last()
    rank, size = _place()
    subject = subject_of(model, size, timeout_s, seed, None)
    meeting = Meeting(f"save of step {step}", timeout_s=subject.timeout_s, wait_s=wait_s)
    request = Request(str(root), step, checksum, keep, merged, subject.versions, hook)
    take = partial(_snapshot, subject, optimizers, schedulers, state or {}, metadata, session or {}, step, rank)
    if not asynchronous:
        return save_together(meeting, request, take)
    try:
        prepare = partial(_given, _staged(take()), None)
    except Exception as error:  # the others learn of it in the first collective of the save
        prepare = partial(_given, None, error)
    handle = in_background(step, partial(save_together, meeting, request, prepare), meeting.largest)
    if isinstance(model, Reduction):
        model.background = lambda: handle.poll(model.update)
    return handle


def load_training_state(
    model: Any,
    optimizer: Any,
    root: str | Path,
    *,
    scheduler: Any = None,
    state: Mapping[str, Any] | None = None,
    skip: Collection[str] = (),
    missing_ok: bool = False,
    timeout_s: float = 600.0,
    seed: int = 0,
    data_rank: int | None = None,
    wait_s: float = ARRIVE_WITHIN_S,
) -> Loaded | None:
    """Put back what `save_training_state` saved, under the same plan or any other. Collective.

    Args:
        root: of the run, whose newest committed step is loaded; or a step's directory.
        scheduler, state: as when saving; those with `load_state_dict` are filled.
        skip: what of it is left as it is here: "optimizer" (and its schedule), "scheduler" (and learning rates), "generators".
        data_rank: of a model that no plan speaks for: ranks with equal ones draw alike on other ranks than those that saved; None
            lets all draw alike.
        missing_ok: return None, and change nothing, where `root` has no step yet.
        model, optimizer, timeout_s, seed, wait_s: as in `save_training_state`.

    Raises:
        CheckpointError: on every rank. Model and optimizer are then undefined: load another step, or start anew.
    """
    odd = sorted(set(skip) - _PARTS)
    if odd:
        raise UsageError(f"skip={odd[0]!r}; expected some of {', '.join(sorted(_PARTS))}")
    optimizers, schedulers = as_mapping(optimizer), _schedulers(scheduler)
    wait_for_the_last()
    rank, size = _place()
    subject = subject_of(model, size, timeout_s, seed, data_rank)
    meeting = Meeting("load", timeout_s=subject.timeout_s, wait_s=wait_s)
    fill = partial(_fill, subject, optimizers, schedulers, state or {}, frozenset(skip), rank)
    mark = partial(setattr, model, "undefined", _UNDEFINED) if isinstance(model, Reduction) else lambda: None
    found: Loaded | None = loading.load_together(meeting, root, fill, missing_ok=missing_ok, began=mark)
    if isinstance(model, Reduction) and found is not None:
        model.undefined, model.update = None, found.step
    return found


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _schedulers(scheduler: Any) -> Mapping[str, Any]:
    found = {} if scheduler is None else scheduler if isinstance(scheduler, Mapping) else {"**": scheduler}
    odd = [one for one in found.values() if not callable(getattr(one, "state_dict", None))]
    if odd:
        raise UsageError(f"a {type(odd[0]).__name__} as the scheduler; expected one with state_dict(), or pattern -> that")
    return found


def _given(snapshot: Snapshot | None, failure: Exception | None) -> Snapshot:
    if failure is not None:
        raise failure
    assert snapshot is not None
    return snapshot


def _snapshot(
    subject: Subject,
    optimizers: Optimizers,
    schedulers: Mapping[str, Any],
    objects: Mapping[str, Any],
    metadata: Any,
    session: Mapping[str, Any],
    step: int,
    rank: int,
) -> Snapshot:
    named = subject.entries(optimizers)
    elsewhere = {entry.name for entry in named}
    native = [one for one in subject.held if one.name not in elsewhere]
    items: list[Item] = [*plugin_items(named), *parameter_items(native)]
    states, values, described = optimizer_items(optimizers, subject.held, elsewhere)
    items += states
    items += buffer_items(persistent_buffers(subject.model, subject.transparent))
    objects = {**objects, **{f"{_EXTRA}{name}": state for name, (_, state) in with_extra_state(subject).items()}}
    own, tensors = stateful_values(objects)
    opaque = {own_tensor(key, rank): tensor for key, tensor in tensors.items()}
    drawn = generator_states(subject.device) | {f"{_MODELS}{name}": state for name, state in _of_the_model(subject).items()}
    opaque |= {f"generator/{rank}/{name}": state for name, state in drawn.items()}
    items += opaque_items(opaque)
    shared = {
        **subject.facts,
        "geometry": dict(subject.geometry),
        "step": step,
        "session": dict(session),
        "metadata": metadata,
        OPTIMIZERS: described,
        OPTIMIZER_VALUES: values,
        SCHEDULERS: {pattern: plain_state(scheduler.state_dict()) for pattern, scheduler in schedulers.items()},
    }
    return Snapshot(tuple(items), shared, own)


_EXTRA = "extra state of "
"""What the keys of modules' own extra state begin with."""


def _fill_extra(checkpoint: Checkpoint, subject: Subject, rank: int, *, same_ranks: bool) -> None:
    here = with_extra_state(subject)
    saved = {key.removeprefix(_EXTRA) for key in checkpoint.value(OWN) if key.startswith(_EXTRA)}
    odd = sorted(here.keys() ^ saved) if len(subject.held) == len(subject.everywhere) else sorted(here.keys() - saved)
    if odd:
        raise CheckpointError(
            f"{checkpoint.path}: extra state of module {odd[0]} is "
            f"{'not saved' if odd[0] in here else 'saved, and not known here'}; expected the "
            "model that was saved",
            path=str(checkpoint.path),
        )
    for name, (module, _) in here.items():
        module.set_extra_state(loading.own_value(checkpoint, f"{_EXTRA}{name}", rank, same_ranks=same_ranks))


_MODELS = "model:"
"""What the names of a model's own generators begin with."""


def _of_the_model(subject: Subject) -> Mapping[str, torch.Tensor]:
    """States of generators that a model has beside torch's, by name: its `generator_states()`, which `set_generator_states` takes back.

    None of them means that it seeds them anew, as it does when it is new, from torch's own.
    """
    found: Mapping[str, torch.Tensor] = getattr(subject.model, "generator_states", dict)()
    return found


def _staged(snapshot: Snapshot) -> Snapshot:
    items = staged(snapshot.items, _staging, clone=_clone)
    kept = {id(item.piece.tensor) for item in items}
    for key in [key for key, tensor in _staging.items() if id(tensor) not in kept]:
        del _staging[key]
    # what lists and dicts of the caller hold now: they are read again in the thread, when training has gone on
    return attrs.evolve(snapshot, items=tuple(items), shared=copied(snapshot.shared), own=copied(snapshot.own))


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return empty.copy_(tensor)


def _fill(
    subject: Subject,
    optimizers: Optimizers,
    schedulers: Mapping[str, Any],
    objects: Mapping[str, Any],
    skip: frozenset[str],
    rank: int,
    checkpoint: Checkpoint,
) -> Loaded:
    same = checkpoint.value("geometry") == dict(subject.geometry)
    reshard(subject.model)
    elsewhere = subject.load_entries(optimizers, checkpoint)
    native = [one for one in subject.held if one.name not in elsewhere]
    loading.require_names(checkpoint, {one.name for one in native}, "parameter", everywhere=subject.everywhere)
    loading.fill_parameters(checkpoint, native)
    buffers = persistent_buffers(subject.model, subject.transparent)
    if len(subject.held) == len(subject.everywhere):  # else other stages may have others
        loading.require_buffers(checkpoint, buffers)
    loading.fill_buffers(checkpoint, buffers, rank if same else 0)
    if "optimizer" not in skip:
        places = loading.fill_optimizers(checkpoint, optimizers, subject.held, elsewhere, rates="scheduler" not in skip)
        if "scheduler" not in skip:
            fill_schedulers(checkpoint, schedulers, optimizers, places)
    _fill_extra(checkpoint, subject, rank, same_ranks=same)
    plain = {}
    for key, thing in objects.items():
        value = loading.own_value(checkpoint, key, rank, same_ranks=same)
        if callable(getattr(thing, "load_state_dict", None)):
            thing.load_state_dict(value)
        else:
            plain[key] = value
    left = sorted(key for key in set(checkpoint.value(OWN)) - set(objects) if not key.startswith(_EXTRA))
    if left and rank == 0:
        _log.warning("state_not_loaded", keys=left, way_out="pass them in state= when loading")
    # at the end: what was loaded above may have drawn numbers
    if "generators" in skip:
        pass
    elif same:
        names = [key.rpartition("/")[2] for key in checkpoint.metadata.opaque if key.startswith(f"generator/{rank}/")]
        states = {name: checkpoint.opaque(f"generator/{rank}/{name}") for name in names}
        restore_generators(states, subject.device)
        own_states = {name.removeprefix(_MODELS): state for name, state in states.items() if name.startswith(_MODELS)}
        getattr(subject.model, "set_generator_states", _same)(own_states)
    else:
        getattr(subject.model, "set_generator_states", _same)({})
        seed_generators(subject.seed, checkpoint.step, subject.position)
    return Loaded(checkpoint.step, checkpoint.path, checkpoint.value("metadata"), plain, checkpoint.value("session"), same)


def _same(value: Any) -> Any:
    return value

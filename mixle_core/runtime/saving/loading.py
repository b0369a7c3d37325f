"""One load: every rank reads its own blocks, and none goes on unless all could."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from mixle_core.checkpoint import Checkpoint, CheckpointError, latest, open_checkpoint, survey
from mixle_core.runtime.saving.held import Held, local_of, names_of
from mixle_core.runtime.saving.meeting import Meeting, as_error
from mixle_core.runtime.saving.merging import OPTIMIZER_VALUES, OPTIMIZERS, OWN
from mixle_core.runtime.saving.plain import own_tensor, put_tensors
from mixle_core.runtime.saving.snapshot import BUFFER, held_in, kind_of, own_buffer
from mixle_core.runtime.state import PARAMETER

_RATES = {"lr", "initial_lr"}
"""Options that a schedule sets."""

_log = structlog.get_logger("mixle.checkpoint")


def find_step(root: str | Path) -> Path:
    """The step to load: the directory itself when it is one, else the newest committed step in it.

    Raises:
        CheckpointError: neither; with the reasons of those that do not load.
    """
    place = Path(root).absolute()
    if (place / "_SUCCESS").exists() or re.fullmatch(r"step-\d+", place.name):
        return place
    found = latest(place)
    if found is not None:
        newer = [entry for entry in survey(place) if entry.problem and entry.path.name > found.name]
        if newer:
            _log.warning("newer_steps_do_not_load", steps=[entry.step for entry in newer], problem=newer[-1].problem, loading=found.name)
        return found
    if not place.is_dir():
        raise CheckpointError(f"{place}: no such directory; expected one with steps, or a step", path=str(place))
    broken = [entry.problem for entry in survey(place) if entry.problem]
    said = f"; {len(broken)} do not load, such as: {broken[-1]}" if broken else ""
    raise CheckpointError(
        f"{place}: no committed step{said}; expected one; way out: load another directory, or start anew", path=str(place)
    )


def load_together(
    meeting: Meeting,
    root: str | Path,
    fill: Callable[[Checkpoint], Any],
    *,
    missing_ok: bool = False,
    began: Callable[[], None] = lambda: None,
) -> Any:
    """Open the same step on every rank and fill from it. Collective.

    Args:
        began: called on every rank once there is a step to fill from.

    Returns:
        What `fill` returns on this rank; None where `missing_ok` and no attempt at a step was ever committed.

    Raises:
        CheckpointError: what failed on any rank, on every rank.
    """
    place, failure = None, None
    if meeting.rank == 0:
        try:
            place = None if missing_ok and _is_fresh(root) else str(find_step(root))
        except Exception as error:
            failure = as_error(error)
    place, failure = meeting.share((place, failure))
    if failure is not None:
        raise failure
    if place is None:
        return None
    began()
    found = None
    try:
        with open_checkpoint(str(place)) as checkpoint:
            found = fill(checkpoint)
    except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
        failure = as_error(error)
    meeting.settle(failure)
    return found


def newest_step(root: str | Path) -> int | None:
    """Number of the newest step of a run that is whole; None when there is none."""
    found = latest(Path(root).absolute())
    return None if found is None else int(found.name.removeprefix("step-"))


def _is_fresh(root: str | Path) -> bool:
    """Whether there is no step to load, not even one that is damaged."""
    place = Path(root).absolute()
    return not place.exists() or (place.is_dir() and not (place / "_SUCCESS").exists() and not survey(place))


def require_names(checkpoint: Checkpoint, names: Collection[str], kind: str, *, everywhere: Collection[str]) -> None:
    """The checkpoint has a tensor of `kind` for each name, and for no others.

    Args:
        names: that this rank is going to read.
        everywhere: that any rank has.

    Raises:
        CheckpointError: naming the first that is missing on either side.
    """
    saved = {name for name, kinds in checkpoint.metadata.tensors.items() if kind in kinds}
    missing, extra = sorted(set(names) - saved), sorted(saved - set(everywhere))
    if missing or extra:
        what = (
            f"no {kind} {missing[0]} ({len(missing)} missing)"
            if missing
            else f"{kind} {extra[0]}, which the model has not ({len(extra)} such)"
        )
        raise CheckpointError(
            f"{checkpoint.path}: {what}; expected the model that was saved; way out: build that model, or load its "
            "values with your own code",
            path=str(checkpoint.path),
        )


def fill_parameters(checkpoint: Checkpoint, held: Iterable[Held]) -> None:
    """Write the saved values into the parameters of this rank."""
    for one in held:
        _require_shape(checkpoint, one.name, PARAMETER, one.shape, one.parameter.dtype)
        _fill(checkpoint, one, PARAMETER, one.parameter)


def fill_buffers(checkpoint: Checkpoint, buffers: Mapping[str, torch.Tensor], rank: int) -> None:
    """Write the saved values into persistent buffers: the rank's own where they differed and this rank was there."""
    for name, buffer in buffers.items():
        local = local_of(buffer)
        if BUFFER in checkpoint.kinds(name):
            _require_shape(checkpoint, name, BUFFER, tuple(local.shape), local.dtype)
            _copy(local, checkpoint.read(name, BUFFER, (0,) * local.dim(), tuple(local.shape)))
            continue
        saved = [key for key in (own_buffer(name, rank), own_buffer(name, 0)) if key in checkpoint.metadata.opaque]
        if not saved:
            raise CheckpointError(f"{checkpoint.path}: no buffer {name}; expected the model that was saved", path=str(checkpoint.path))
        values = checkpoint.opaque(saved[0])
        if values.shape != local.shape or values.dtype != local.dtype:
            raise _other(checkpoint, name, BUFFER, (tuple(values.shape), values.dtype), (tuple(local.shape), local.dtype))
        _copy(local, values)


def fill_optimizers(
    checkpoint: Checkpoint,
    optimizers: Mapping[str, torch.optim.Optimizer],
    held: Sequence[Held],
    elsewhere: Collection[str],
    *,
    rates: bool = True,
) -> dict[str, list[int]]:
    """Give the optimizers the saved state of their parameters and the options of their groups.

    What was never stepped has no state and gets none. State of parameters that no optimizer here steps, because they are frozen now,
    is passed over with a warning.

    Args:
        elsewhere: names whose state a plugin loads.
        rates: whether learning rates are loaded, too.

    Returns:
        Pattern -> for each group here, the place of the group that was saved.

    Raises:
        CheckpointError: an optimizer or group that was not saved, state of another shape.
    """
    by_id, places = names_of(held), dict[str, list[int]]()
    described, values = checkpoint.value(OPTIMIZERS), checkpoint.values.get(OPTIMIZER_VALUES, {})
    for pattern, optimizer in optimizers.items():
        if pattern not in described or described[pattern]["class"] != kind_of(optimizer):
            was = described[pattern]["class"] if pattern in described else f"{', '.join(map(repr, described)) or 'none'}"
            raise CheckpointError(
                f"{checkpoint.path}: optimizer {pattern!r} is a {kind_of(optimizer)} here, and {was} was saved; expected the same "
                "optimizer for the same pattern",
                path=str(checkpoint.path),
            )
        groups = described[pattern]["groups"]
        members = [[one.name for one in held_in(group, optimizer, by_id)] for group in optimizer.param_groups]
        _require_members(checkpoint, pattern, members, groups, [{**group, "params": None} for group in optimizer.param_groups])
        places[pattern] = []
        for number, group in enumerate(optimizer.param_groups):
            known = held_in(group, optimizer, by_id)
            places[pattern].append(_set_options(checkpoint, pattern, number, group, groups, members[number], rates=rates))
            for one in known:
                if one.name not in elsewhere:
                    _fill_state(checkpoint, optimizer, group, one, values.get(one.name, {}))
    # of a plugin's, a rank may step slices of some parameters only
    _note_left(checkpoint, described, optimizers, [one for one in held if one.name not in elsewhere], by_id)
    return places


def _require_members(
    checkpoint: Checkpoint,
    pattern: str,
    members: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    here: Sequence[Mapping[str, Any]],
) -> None:
    """Every parameter was stepped by this optimizer before, and what was one group then has one set of options now."""
    group_of = {name: index for index, other in enumerate(saved) for name in other["names"]}
    new = sorted({name for names in members for name in names} - group_of.keys())
    split = {
        index: [n for n, names in enumerate(members) if any(group_of.get(name) == index for name in names)] for index in range(len(saved))
    }
    unlike = [numbers for numbers in split.values() if any(here[n] != here[numbers[0]] for n in numbers)]
    if new or unlike:
        what = f"{new[0]} ({len(new)} such) was not stepped by it" if new else f"groups {unlike[0]}, whose options differ, were one group"
        raise CheckpointError(
            f"{checkpoint.path}: optimizer {pattern!r}: {what} when it was saved; expected the same parameters and "
            "groups; way out: build the "
            'optimizer as it was, or load without it: skip=("optimizer",)',
            path=str(checkpoint.path),
        )


def _note_left(
    checkpoint: Checkpoint,
    described: Mapping[str, Any],
    optimizers: Mapping[str, torch.optim.Optimizer],
    held: Sequence[Held],
    by_id: Mapping[int, Held],
) -> None:
    """State that was saved of parameters here and that no optimizer takes: frozen ones are said, others are an error."""
    taken = {one.name for optimizer in optimizers.values() for group in optimizer.param_groups for one in held_in(group, optimizer, by_id)}
    was = {name: pattern for pattern, entry in described.items() for group in entry["groups"] for name in group["names"]}
    left = sorted(one.name for one in held if one.name in was and one.name not in taken)
    trainable = [one.name for one in held if one.name in set(left) and one.parameter.requires_grad]
    if trainable:
        raise CheckpointError(
            f"{checkpoint.path}: {trainable[0]} ({len(trainable)} such) was stepped by optimizer {was[trainable[0]]!r}, "
            "and none here steps it; "
            'expected the optimizers that were saved; way out: pass them all, or load without them: skip=("optimizer",)',
            path=str(checkpoint.path),
        )
    if left:
        _log.warning("optimizer_state_not_loaded", parameters=len(left), such_as=left[0], reason="frozen here, and in no optimizer")


def _set_options(
    checkpoint: Checkpoint,
    pattern: str,
    number: int,
    group: dict[str, Any],
    saved: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    rates: bool,
) -> int:
    where = [index for index, other in enumerate(saved) if set(names) & set(other["names"])] if names else [number]
    # what was saved in several groups, such as experts in one of their own, may have had the same options
    alike = where and where[-1] < len(saved) and all(saved[index]["options"] == saved[where[0]]["options"] for index in where)
    if not alike:
        raise CheckpointError(
            f"{checkpoint.path}: group {number} of optimizer {pattern!r} has parameters of {len(where)} groups that were saved, such as "
            f"{names[0] if names else 'none'}; expected the same groups; way out: build the optimizer as it was",
            path=str(checkpoint.path),
        )
    options = {key: value for key, value in saved[where[0]]["options"].items() if rates or key not in _RATES}
    odd = sorted(({key for key in group if key != "params"} ^ options.keys()) - ({"initial_lr"} if rates else _RATES))
    if odd:
        raise CheckpointError(
            f"{checkpoint.path}: option {odd[0]!r} of optimizer {pattern!r} is "
            f"{'not saved' if odd[0] in group else 'unknown here'}; expected "
            "the optimizer that was saved; way out: use the version of it that saved",
            path=str(checkpoint.path),
        )
    for key, value in options.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
    return where[0]


def _fill_state(
    checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], one: Held, values: Mapping[str, Any]
) -> None:
    parameter = one.parameter
    kinds = [kind for kind in checkpoint.kinds(one.name) if kind != PARAMETER]
    if not kinds and not values:
        optimizer.state.pop(parameter, None)
        return
    state = optimizer.state[parameter]
    before = dict(state)
    state.clear()
    for kind in kinds:
        stored = checkpoint.stored(one.name, kind)
        if stored.shape == one.shape and (stored.shape or kind != "step"):
            known = before.get(kind)  # memory that is there already is filled again
            fits = isinstance(known, torch.Tensor) and one.fits(known) and known.dtype == stored.torch_dtype
            state[kind] = known if fits else torch.empty_like(parameter, dtype=stored.torch_dtype, requires_grad=False)
            _fill(checkpoint, one, kind, state[kind])
            continue
        if stored.shape and not one.is_whole:
            raise _other(checkpoint, one.name, kind, (stored.shape, stored.torch_dtype), (one.shape, stored.torch_dtype))
        value = checkpoint.read(one.name, kind, (0,) * len(stored.shape), stored.shape)
        # torch keeps the number of steps on the CPU, unless it steps on the device
        on_device = bool(stored.shape) or group.get("capturable") or group.get("fused")
        state[kind] = value.to(parameter.device) if on_device else value
    state.update(values)


def _fill(checkpoint: Checkpoint, one: Held, kind: str, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        for offset, view in one.views(tensor):
            if view.is_contiguous() and view.device.type == "cpu":
                checkpoint.read_into(one.name, kind, offset, view)
            else:
                view.copy_(checkpoint.read(one.name, kind, offset, tuple(view.shape)))


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)


def _require_shape(checkpoint: Checkpoint, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stored = checkpoint.stored(name, kind)
    if (stored.shape, stored.torch_dtype) != (shape, dtype):
        raise _other(checkpoint, name, kind, (stored.shape, stored.torch_dtype), (shape, dtype))


def _other(checkpoint: Checkpoint, name: str, kind: str, saved: tuple[Any, Any], here: tuple[Any, Any]) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: {name} ({kind}) was saved as {saved[1]} of shape {list(saved[0])}; expected {here[1]} of "
        f"shape {list(here[0])}; way "
        "out: build the model that was saved",
        path=str(checkpoint.path),
    )


def require_buffers(checkpoint: Checkpoint, buffers: Mapping[str, torch.Tensor]) -> None:
    """Every persistent buffer that was saved is here; `fill_buffers` asks the other way round.

    Raises:
        CheckpointError: naming the first that is not.
    """
    saved = {name for name, kinds in checkpoint.metadata.tensors.items() if BUFFER in kinds}
    saved |= {key.removeprefix("buffer/").rpartition("/")[0] for key in checkpoint.metadata.opaque if key.startswith("buffer/")}
    extra = sorted(saved - buffers.keys())
    if extra:
        raise CheckpointError(
            f"{checkpoint.path}: buffer {extra[0]}, which the model has not ({len(extra)} such); expected the model "
            "that was saved; way out: "
            "build that model",
            path=str(checkpoint.path),
        )


def own_value(checkpoint: Checkpoint, key: str, rank: int, *, same_ranks: bool) -> Any:
    """A value that may differ between ranks, with its tensors.

    Args:
        same_ranks: whether the ranks here are those that saved.

    Raises:
        CheckpointError: it was not saved, or it differs between ranks and the ranks are others now.
    """
    entry = checkpoint.value(OWN).get(key)
    if entry is None:
        there = ", ".join(checkpoint.value(OWN)) or "none"
        raise CheckpointError(
            f"{checkpoint.path}: no state {key!r}; there are {there}; way out: ask for one of them", path=str(checkpoint.path)
        )
    if "alike" in entry:
        return put_tensors(entry["alike"], lambda name: checkpoint.opaque(own_tensor(name, entry["of"])))
    if not same_ranks or rank not in entry["by rank"]:
        raise CheckpointError(
            f"{checkpoint.path}: state {key!r} was another one on each rank, and the ranks are others now; expected the "
            "plan that saved; way "
            "out: leave it out of state= when loading, and go on without it",
            path=str(checkpoint.path),
        )
    return put_tensors(entry["by rank"][rank], lambda name: checkpoint.opaque(own_tensor(name, rank)))

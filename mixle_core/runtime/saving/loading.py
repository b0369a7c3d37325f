"""One load: every rank reads its own blocks, and none goes on unless all could."""

from __future__ import annotations

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

_log = structlog.get_logger("mixle.checkpoint")


def find_step(root: str | Path) -> Path:
    """The step to load: the directory itself when it is one, else the newest committed step in it.

    Raises:
        CheckpointError: neither; with the reasons of those that do not load.
    """
    place = Path(root).absolute()
    if (place / "_SUCCESS").exists() or (place / "metadata.json").exists():
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


def load_together(meeting: Meeting, root: str | Path, fill: Callable[[Checkpoint], Any], *, missing_ok: bool = False) -> Any:
    """Open the same step on every rank and fill from it. Collective.

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
    found = None
    try:
        with open_checkpoint(str(place)) as checkpoint:
            found = fill(checkpoint)
    except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
        failure = as_error(error)
    meeting.settle(failure)
    return found


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
    checkpoint: Checkpoint, optimizers: Mapping[str, torch.optim.Optimizer], held: Iterable[Held], elsewhere: Collection[str]
) -> dict[str, list[int]]:
    """Give the optimizers the saved state of their parameters and the options of their groups.

    What was never stepped has no state and gets none. State of parameters that no optimizer holds here is passed over.

    Args:
        elsewhere: names whose state a plugin loads.

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
        places[pattern] = []
        for number, group in enumerate(optimizer.param_groups):
            known = held_in(group, optimizer, by_id)
            places[pattern].append(_set_options(checkpoint, pattern, number, group, groups, [one.name for one in known]))
            for one in known:
                if one.name not in elsewhere:
                    _fill_state(checkpoint, optimizer, group, one, values.get(one.name, {}))
    return places


def _set_options(
    checkpoint: Checkpoint, pattern: str, number: int, group: dict[str, Any], saved: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> int:
    where = [index for index, other in enumerate(saved) if set(names) & set(other["names"])] if names else [number]
    # what was saved in several groups, as Megatron has experts in one of their own, may have had the same options
    alike = where and where[-1] < len(saved) and all(saved[index]["options"] == saved[where[0]]["options"] for index in where)
    if not alike:
        raise CheckpointError(
            f"{checkpoint.path}: group {number} of optimizer {pattern!r} has parameters of {len(where)} groups that were saved, such as "
            f"{names[0] if names else 'none'}; expected the same groups; way out: build the optimizer as it was",
            path=str(checkpoint.path),
        )
    options = saved[where[0]]["options"]
    odd = sorted({key for key in group if key != "params"} ^ options.keys())
    if odd:
        raise CheckpointError(
            f"{checkpoint.path}: option {odd[0]!r} of optimizer {pattern!r} is "
            f"{'not saved' if odd[0] in group else 'unknown here'}; expected "
            "the optimizer that was saved; way out: use the version of it that saved",
            path=str(checkpoint.path),
        )
    group.update(options)
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
    state.clear()
    for kind in kinds:
        stored = checkpoint.stored(one.name, kind)
        if stored.shape == one.shape:
            state[kind] = torch.zeros_like(parameter, dtype=stored.torch_dtype, requires_grad=False)
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
        return put_tensors(entry["alike"], lambda name: checkpoint.opaque(own_tensor(name, 0)))
    if not same_ranks or rank not in entry["by rank"]:
        raise CheckpointError(
            f"{checkpoint.path}: state {key!r} was another one on each rank, and the ranks are others now; expected the "
            "plan that saved; way "
            "out: leave it out of state= when loading, and go on without it",
            path=str(checkpoint.path),
        )
    return put_tensors(entry["by rank"][rank], lambda name: checkpoint.opaque(own_tensor(name, rank)))

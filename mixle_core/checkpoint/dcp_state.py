"""What the entries of a checkpoint of plain torch are: parameters, buffers, state of an optimizer by parameter, and its options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from mixle_core.checkpoint.dcp_metadata import DcpEntry, DcpTensor, DcpValue, Keys
from mixle_core.checkpoint.dcp_optimizer import LIKE_PARAMETERS, class_of, completed
from mixle_core.checkpoint.errors import CheckpointError
from mixle_core.checkpoint.values import encode
from mixle_core.layout import logical_name, matches

MODELS = ("model", "state_dict")
OPTIMIZERS = ("optim", "optimizer")
SCHEDULERS = ("lr_scheduler", "scheduler")
"""Under which keys of the state dict they are looked for."""

_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_RESERVED = ("parameter", "buffer")


@attrs.frozen(eq=False)
class Source:
    """Entries of a checkpoint, and how to read them.

    Args:
        where: the directory, for errors.
        value: reads what is no tensor.
        number: reads a tensor of one element.
    """

    where: str
    entries: Sequence[DcpEntry]
    value: Callable[[DcpValue], Any]
    number: Callable[[DcpTensor], float]

    def refuse(self, found: str, expected: str, way_out: str) -> CheckpointError:
        """What is wrong with the checkpoint as a whole."""
        return CheckpointError(f"{self.where}: {found}; expected {expected}; way out: {way_out}", path=self.where)


@attrs.frozen(eq=False)
class Wishes:
    """What the caller said of a checkpoint.

    Args:
        model: key of the model in the state dict; `optimizer` is the class of the optimizer.
        buffers: patterns of names that are buffers.
        tied: alias -> name of the parameter that it is.
        order: names of the parameters as the optimizer was given them, for one that numbers them.
    """

    model: str | None = None
    optimizer: str | None = None
    buffers: tuple[str, ...] = ()
    tied: Mapping[str, str] = attrs.field(factory=dict)
    order: tuple[str, ...] | None = None


@attrs.frozen(eq=False)
class Arranged:
    """What is to be written.

    Args:
        model: name -> tensor; the names in `buffers` are no parameters.
        aliases: alias -> its tensor, of the parameters that were said to be tied.
        state: (name, kind, tensor).
        numbers: (name, kind, value) of state that is written as a tensor of one number.
        values: name -> kind -> value of other state.
        optimizer: class and groups; None when there was none.
        scheduler: its state; None when there was none.
        rest: key -> value, and `opaque`: key -> tensor, of everything else.
    """

    model: Mapping[str, DcpTensor]
    buffers: frozenset[str]
    aliases: Mapping[str, DcpTensor]
    state: Sequence[tuple[str, str, DcpTensor]]
    numbers: Sequence[tuple[str, str, float]]
    values: Mapping[str, Mapping[str, Any]]
    optimizer: Mapping[str, Any] | None
    scheduler: Mapping[str, Any] | None
    rest: Mapping[str, Any]
    opaque: Mapping[str, DcpTensor]


def arrange(source: Source, wishes: Wishes) -> Arranged:
    """Sort the entries.

    Raises:
        CheckpointError: no model, two tensors with one name, state of no parameter, values that are not plain, an unknown optimizer.
    """
    entries = _unwrapped(source.entries)
    roots = {path[0] for path, _ in entries if len(path) > 1}
    model_key = wishes.model or next((key for key in MODELS if key in roots), None)
    optimizer_key = next((key for key in OPTIMIZERS if key in roots and key != model_key), None)
    scheduler_key = next((key for key in SCHEDULERS if key in roots and key != model_key), None)
    model, optimizer, scheduler, rest = [], [], [], []
    for path, entry in entries:
        inside = path[0] == model_key and len(path) > 1 if model_key else len(path) == 1 and isinstance(entry, DcpTensor)
        if inside and isinstance(entry, DcpTensor):
            model.append((path[1:] if model_key else path, entry))
        elif path[0] == optimizer_key:
            optimizer.append((path[1:], entry))
        elif path[0] == scheduler_key:
            scheduler.append((path[1:], entry))
        else:
            rest.append((path, entry))
    tensors = _named(source, model)
    if not tensors:
        there = ", ".join(map(str, sorted({str(path[0]) for path, _ in entries})[:8])) or "nothing"
        raise source.refuse(
            f"no tensor of a model{f' under {model_key!r}' if model_key else ''}; there is {there}", "some", "name the key of the model"
        )
    reading = _Optimizer(source, wishes, tensors)
    described, owners = reading.read(optimizer) if optimizer else (None, frozenset[str]())
    buffers = frozenset(name for name, tensor in tensors.items() if name not in owners and _is_buffer(name, tensor, wishes.buffers))
    aliases = _aliases(source, wishes, tensors)
    odd = sorted(aliases.keys() & {name for name, *_ in (*reading.state, *reading.numbers)})
    if odd:
        raise source.refuse(f"{odd[0]} has optimizer state of its own", "none of a tied name", "do not call it tied")
    return Arranged(
        model={name: tensor for name, tensor in tensors.items() if name not in aliases},
        buffers=buffers,
        aliases=aliases,
        state=reading.state,
        numbers=reading.numbers,
        values=reading.values,
        optimizer=_without(described, aliases),
        scheduler=_scheduler(source, scheduler) if scheduler else None,
        rest={entry.key: _said(source, entry) for _, entry in rest if isinstance(entry, DcpValue)},
        opaque={entry.key: entry for _, entry in rest if isinstance(entry, DcpTensor)},
    )


def _unwrapped(entries: Iterable[DcpEntry]) -> list[tuple[Keys, DcpEntry]]:
    """Paths without the key of an object that holds everything, as in `{"app": AppState(model, optimizer)}`."""
    found = [(entry.path, entry) for entry in entries]
    while found and len({path[0] for path, _ in found}) == 1 and any(len(path) > 2 and path[1] in MODELS for path, _ in found):
        found = [(path[1:], entry) for path, entry in found if len(path) > 1]
    return found


def _named(source: Source, found: Iterable[tuple[Keys, DcpTensor]]) -> dict[str, DcpTensor]:
    tensors: dict[str, DcpTensor] = {}
    for path, entry in found:
        name = logical_name(".".join(map(str, path)))
        if name in tensors:
            raise source.refuse(
                f"{tensors[name].key} and {entry.key} are both {name} without the segments of wrappers", "one", "skip one of them"
            )
        tensors[name] = entry
    return tensors


def _is_buffer(name: str, tensor: DcpTensor, patterns: Iterable[str]) -> bool:
    trainable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not trainable or name.rpartition(".")[2] in _STATISTICS or any(matches(pattern, name) for pattern in patterns)


def _aliases(source: Source, wishes: Wishes, tensors: Mapping[str, DcpTensor]) -> dict[str, DcpTensor]:
    for alias, name in wishes.tied.items():
        odd = next((one for one in (alias, name) if one not in tensors), None)
        if odd is not None or name in wishes.tied:
            raise source.refuse(
                f"{alias} tied to {name}: {odd or name} is {'not there' if odd else 'tied itself'}", "two names", "correct it"
            )
    return {alias: tensors[alias] for alias in wishes.tied}


def _without(described: dict[str, Any] | None, aliases: Iterable[str]) -> dict[str, Any] | None:
    for group in described["groups"] if described else ():
        group["names"] = sorted(set(group["names"]) - set(aliases))
    return described


def _scheduler(source: Source, found: Sequence[tuple[Keys, DcpEntry]]) -> dict[str, Any]:
    state = _nested(source, found)
    if type(state) is not dict:
        raise source.refuse(f"{found[0][1].key} is a {type(state).__name__}", "the state dict of one scheduler", "skip it")
    return state


def _said(source: Source, entry: DcpValue) -> Any:
    value = source.value(entry)
    encode(value, entry.key)
    return value


def _nested(source: Source, found: Sequence[tuple[Keys, DcpEntry]]) -> Any:
    """The value that was flattened into entries; numbers in paths are places of lists."""
    root: dict[Any, Any] = {}
    for path, entry in found:
        if not isinstance(entry, DcpValue):
            raise source.refuse(f"{entry.key} is a tensor", "a plain value", "skip it")
        if not path and len(found) == 1:
            return _said(source, entry)
        place = root
        for part in path[:-1]:
            place = place.setdefault(part, {})
        if not path or type(place) is not dict or path[-1] in place:
            raise source.refuse(f"{entry.key} lies inside a value, or is there twice", "one or the other", "skip it")
        place[path[-1]] = _said(source, entry)
    return _lists(root)


def _lists(value: Any) -> Any:
    if type(value) is not dict:
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[index] for index in range(len(inner))]
    return inner


class _Optimizer:
    """State and options of one optimizer, by parameter."""

    def __init__(self, source: Source, wishes: Wishes, tensors: Mapping[str, DcpTensor]) -> None:
        self.source, self.wishes, self.tensors = source, wishes, tensors
        self.state: list[tuple[str, str, DcpTensor]] = []
        self.numbers: list[tuple[str, str, float]] = []
        self.values: dict[str, dict[str, Any]] = {}

    def read(self, entries: Sequence[tuple[Keys, DcpEntry]]) -> tuple[dict[str, Any], frozenset[str]]:
        """Class and groups, and the names that the optimizer has."""
        kept, options = [], []
        for path, entry in entries:
            flat = str(path[0]) if len(path) == 1 else ""
            if path[0] == "state" and len(path) > 2:
                kept.append((str(path[1]), path[2:], entry))
            elif flat.startswith("state."):
                name, _, kind = flat.removeprefix("state.").rpartition(".")
                kept.append((name, (kind,), entry))
            elif path[0] == "param_groups" or flat.startswith("param_groups."):
                options.append((path, entry))
            else:
                raise self.source.refuse(f"{entry.key} is no state and no option", "what an optimizer's state dict has", "skip it")
        groups = self._groups(options)
        names = self._names([key for key, *_ in kept], groups)
        chosen = class_of(self.source.where, [group["options"] for group in groups], self.wishes.optimizer)
        for key, path, entry in kept:
            if key not in names:
                raise self.source.refuse(f"{entry.key} belongs to no parameter of the model", "one", "skip it, or name the model's key")
            self._add(names[key], ".".join(map(str, path)), entry, chosen)
        described = [
            {"names": sorted(names[key] for key in group["keys"]), "options": completed(chosen, group["options"])} for group in groups
        ]
        return {"class": chosen, "groups": described}, frozenset(name for group in described for name in group["names"])

    def _groups(self, found: Sequence[tuple[Keys, DcpEntry]]) -> list[dict[str, Any]]:
        """Options, and keys of parameters, of each group."""
        if any(len(path) == 1 and path[0] != "param_groups" for path, _ in found):
            return self._groups_by_name(found)
        groups = _nested(self.source, [(path[1:], entry) for path, entry in found])
        made = []
        for group in groups if type(groups) is list else [groups]:
            if type(group) is not dict or type(group.get("params")) is not list:
                raise self.source.refuse("a group of the optimizer without params", "their names or numbers", "save the whole state dict")
            keys = group.pop("params")
            made.append({"keys": [str(key) for key in keys], "options": group, "by name": any(type(key) is str for key in keys)})
        return made

    def _groups_by_name(self, found: Sequence[tuple[Keys, DcpEntry]]) -> list[dict[str, Any]]:
        """From options that were flattened for each parameter: those with equal options are a group."""
        options: dict[str, dict[str, Any]] = {}
        for path, entry in found:
            key, _, option = str(path[0]).removeprefix("param_groups.").rpartition(".")
            if len(path) != 1 or not isinstance(entry, DcpValue):
                raise self.source.refuse(f"{entry.key} is no option of a parameter", "plain values", "skip it")
            options.setdefault(key, {})[option] = _said(self.source, entry)
        groups: list[dict[str, Any]] = []
        for key, said in options.items():
            same = next((group for group in groups if repr(group["options"]) == repr(said)), None)
            if same is None:
                groups.append(same := {"keys": [], "options": said, "by name": True})
            same["keys"].append(key)
        return groups

    def _names(self, state_keys: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Key of the optimizer -> name of the parameter."""
        keys = [key for group in groups for key in group["keys"]] or list(dict.fromkeys(state_keys))
        if any(group["by name"] for group in groups) or not all(key.isdigit() for key in keys):
            names = {key: logical_name(key) for key in (*keys, *state_keys)}
            odd = sorted(key for key, name in names.items() if name not in self.tensors)
            if odd:
                raise self.source.refuse(f"the optimizer has {odd[0]}, which the model has not", "its parameters", "name the model's key")
            return names
        said = [name for group in groups for name in group["options"].get("param_names", ())]
        untied = {name: tensor for name, tensor in self.tensors.items() if name not in self.wishes.tied}
        candidates = [name for name, tensor in untied.items() if not _is_buffer(name, tensor, self.wishes.buffers)]
        one_group = candidates if len(groups) == 1 else []
        order = [logical_name(name) for name in self.wishes.order or said or one_group]
        if len(order) != len(keys) or len(set(order)) != len(order) or not set(order) <= set(self.tensors):
            raise self.source.refuse(
                f"the optimizer numbers {len(keys)} parameters in {len(groups)} groups, and the model has {len(candidates)}",
                "as many, in one group, so that a number tells a name",
                "give the names in the order in which the optimizer was given them (order=), or save with "
                "torch.distributed.checkpoint.state_dict.get_state_dict, which writes names",
            )
        return dict(zip(keys, order, strict=True))

    def _add(self, name: str, kind: str, entry: DcpEntry, chosen: str) -> None:
        if not kind or kind in _RESERVED:
            raise self.source.refuse(f"{entry.key} is of kind {kind!r}", "another kind", "skip it")
        if isinstance(entry, DcpTensor):
            shape = self.tensors[name].shape
            if entry.shape not in (shape, (), (1,)) and chosen in LIKE_PARAMETERS:
                raise self.source.refuse(
                    f"{entry.key} has shape {list(entry.shape)}, and {name} has {list(shape)}", "the same", "give the right order="
                )
            self.state.append((name, kind, entry))
            return
        value = _said(self.source, entry)
        if kind == "step" and type(value) in (int, float) and hasattr(torch.optim, chosen):
            # torch does so when it loads; a plain number would never be counted on
            self.numbers.append((name, kind, float(value)))
        else:
            self.values.setdefault(name, {})[kind] = value

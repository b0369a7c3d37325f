"""Roles of parameters on a mesh axis, the layouts that declare them, and how patterns meet names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from mixle_core.errors import LayoutError

WRAPPER_SEGMENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Segments that wrappers put into parameter names; a logical name has none of them."""


def _frozen_map(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return dict(value)


def _sizes(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _names(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


@attrs.frozen
class Replica:
    """The same value on every rank of the axis.

    Args:
        gradient: "complete" when each rank computes the whole gradient (redundant computation: average or leave it);
            "partial" when each rank computes one term (head- or sequence-sharded computation: add them up).
        ranks: positions on the axis that hold it, such as the stages of an embedding that is tied across a pipeline, or the
            only stage of a layer; None for all.
    """

    gradient: Literal["complete", "partial"] = attrs.field(default="complete", validator=attrs.validators.in_(("complete", "partial")))
    ranks: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes)


@attrs.frozen
class Shard:
    """A slice whose gradient is final on this axis.

    Args:
        dim: tensor dimension that is cut.
        unit: elements along `dim` that must stay together, such as the size of a head.
        parts: sizes along `dim` of the pieces of a fused matrix; each is cut on its own. None for one piece.
        unit_name: what a unit is called in messages.
    """

    dim: int
    unit: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    parts: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes)
    unit_name: str = attrs.field(default="unit", eq=False)


@attrs.frozen
class Term:
    """Of an activation: each rank holds one term of a sum. Only the inside of a boundary may be one."""


Role = Replica | Shard
Lie = Replica | Shard | Term


@attrs.frozen
class Boundary:
    """Where an activation enters or leaves a module that computes on one rank's share.

    `Replica("complete")` is a value all ranks hold and compute alike; `Replica("partial")` a value all ranks hold whose
    gradient is a sum of the ranks' terms; `Shard(dim)` a slice; `Term()` one term of a sum. The executor of the axis turns
    each pair into one collective and its transpose.

    Args:
        outside: how the activation lies on the axis outside the module.
        inside: how the module's own computation sees it.
    """

    outside: Lie
    inside: Lie


@attrs.frozen
class ModuleLayout:
    """Roles of one module's parameters on one axis, and how its inputs and outputs lie on the axis.

    Args:
        parameters: pattern relative to the module (such as `weight` or `{q,k}_proj.weight`) -> role.
        inputs: position or keyword of a forward argument -> boundary. An integer also finds that argument when it is
            passed by the keyword of the same place in the signature, and a keyword when it is passed by position.
        output: boundary of the result (of its first element when it is a tuple), or None.
        lookup: name of a parameter sharded on dim 0 whose rows the first input indexes; rows of other ranks come out zero.
        once: parameters that are added to an output that is a Term: only the first rank of the axis adds them.
        sharded_dropout: the module draws dropout on sharded activations, so each rank of the axis needs its own masks.
    """

    parameters: Mapping[str, Role] = attrs.field(factory=dict, converter=_frozen_map)
    inputs: Mapping[int | str, Boundary] = attrs.field(factory=dict, converter=_frozen_map)
    output: Boundary | None = None
    lookup: str | None = None
    once: tuple[str, ...] = attrs.field(default=(), converter=_names)
    sharded_dropout: bool = False

    @property
    def executes(self) -> bool:
        """Whether the executor of the axis has anything to install on the module."""
        return bool(self.inputs or self.output or self.lookup or self.once or self.sharded_dropout)


@attrs.frozen
class ModelLayout:
    """What a layout plugin declares about a model for one axis.

    Args:
        axis: a model axis, such as "tp".
        modules: pattern over module names -> ModuleLayout. Exactly one pattern declares a parameter.
        units: patterns of the modules to wrap, and to recompute, as one.
        transparent: name segments that logical names leave out, such as those of an adapter wrapper.
    """

    axis: str
    modules: Mapping[str, ModuleLayout] = attrs.field(factory=dict, converter=_frozen_map)
    units: tuple[str, ...] = attrs.field(default=(), converter=_names)
    transparent: tuple[str, ...] = attrs.field(default=(), converter=_names)


@attrs.frozen
class ParameterLayout:
    """Resolved facts of one logical parameter.

    Args:
        shape: global shape, before any axis cuts it.
        aliases: other logical names of the same tied parameter.
        roles: model axis -> role, for every axis that was declared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    trainable: bool
    aliases: tuple[str, ...] = ()
    roles: Mapping[str, Role] = attrs.field(factory=dict)
    declared_by: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def expert(self) -> bool:
        """Whether it is declared on ep or etp, and so lies in the folded expert view of the mesh."""
        return "ep" in self.roles or "etp" in self.roles

    @property
    def numel(self) -> int:
        """Number of elements of the global shape."""
        return functools.reduce(lambda a, b: a * b, self.shape, 1)

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape on one rank when each axis of `sizes` cuts the parameter by its role."""
        shape = list(self.shape)
        for axis, role in self.roles.items():
            if isinstance(role, Shard):
                shape[role.dim] //= sizes.get(axis, 1)
        return tuple(shape)


@attrs.frozen
class Layouts:
    """Everything declared about one model, keyed by logical names.

    Args:
        modules: axis -> module name -> the layouts whose boundaries the executor installs.
        units: names of the modules to wrap as one, in model order.
        sequence: names in the order in which the model registers them, which collectives of several parameters follow.
    """

    parameters: Mapping[str, ParameterLayout]
    modules: Mapping[str, Mapping[str, ModuleLayout]]
    units: tuple[str, ...]
    transparent: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    @property
    def trainable(self) -> tuple[str, ...]:
        """Names of the trainable parameters, sorted."""
        return tuple(name for name, layout in self.parameters.items() if layout.trainable)


def num_holders(role: Role | None, size: int) -> int:
    """How many of the `size` ranks of an axis hold a replica with this role."""
    return size if not isinstance(role, Replica) or role.ranks is None else len(role.ranks)


def is_held(roles: Mapping[str, Role], position: Mapping[str, int]) -> bool:
    """Whether the rank at `position` holds any of a parameter with `roles`."""
    replicas = ((axis, role) for axis, role in roles.items() if isinstance(role, Replica) and role.ranks is not None)
    return all(axis not in position or position[axis] in (role.ranks or ()) for axis, role in replicas)


def _translate(pattern: str) -> str:
    out, i = "", 0
    while i < len(pattern):
        rest = pattern[i:]
        if rest.startswith("**."):
            out, i = out + r"(?:[^.]+\.)*", i + 3
        elif rest == ".**":
            out, i = out + r"(?:\.[^.]+)*", i + 3
        elif rest.startswith("**"):
            out, i = out + ".*", i + 2
        elif rest[0] == "*":
            out, i = out + ("[^.]+" if pattern[i - 1 : i] in ("", ".") else "[^.]*"), i + 1
        elif rest[0] == "{":
            if "}" not in rest:
                raise LayoutError(f"pattern {pattern!r}: '{{' without '}}'; alternatives look like {{q,k}}_proj")
            body = rest[1 : rest.index("}")]
            out, i = out + "(?:" + "|".join(_translate(part) for part in body.split(",")) + ")", i + len(body) + 2
        else:
            out, i = out + re.escape(rest[0]), i + 1
    return out


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(_translate(pattern))


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` covers the whole of `name`: `*` is one dotted segment, `**` any number, `{a,b}` alternatives."""
    return _regex(pattern).fullmatch(name) is not None


def logical_name(raw: str, transparent: Iterable[str] = ()) -> str:
    """`raw` without the segments of wrappers and without `transparent` ones."""
    segments = [segment for segment in raw.split(".") if segment not in WRAPPER_SEGMENTS]
    name = ".".join(segments)
    for hidden in transparent:
        name = re.sub(rf"(?:^|(?<=\.)){re.escape(hidden)}\.", "", name)
    return name


def generalise(name: str) -> str:
    """`name` with its numeric segments replaced by `*`: the pattern a person would write."""
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))


def join(module: str, name: str) -> str:
    """Dotted name of `name` inside `module`; the root module is ''."""
    return f"{module}.{name}" if module else name


def tied_names(model: Any, transparent: Iterable[str] = ()) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Logical name -> (parameter, its aliases), sorted by name. Tied parameters appear once, under their first name.

    Raises:
        LayoutError: when two different parameters share one logical name.
    """
    first: dict[int, str] = {}
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    owner: dict[str, int] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        name = logical_name(raw, transparent)
        if owner.setdefault(name, id(parameter)) != id(parameter):
            raise LayoutError(
                f"two different parameters have the logical name {name!r} (one of them is {raw!r}); "
                "rename the module whose name is a wrapper segment or a transparent one"
            )
        if id(parameter) in first:
            known, aliases = found[first[id(parameter)]]
            if name != first[id(parameter)] and name not in aliases:
                found[first[id(parameter)]] = (known, (*aliases, name))
        else:
            first[id(parameter)] = name
            found[name] = (parameter, ())
    return dict(sorted(found.items()))

"""A layout as a person would write it: patterns over layers, siblings that are alike in one line, and Python source."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

import attrs

from mixle_core.layout import Boundary, Lie, ModelLayout, ModuleLayout, Replica, Role, Term, generalise, matches

_WIDTH = 100
_WHOLE, _SHARED = Replica("complete"), Replica("partial")
_ENTER, _LEAVE = Boundary(outside=_WHOLE, inside=_SHARED), Boundary(outside=_WHOLE, inside=Term())


@attrs.frozen
class Folded:
    """One pattern and what it stands for.

    Args:
        members: modules that it matches, in model order.
        locals: names of the parameters that each of them holds.
    """

    pattern: str
    members: tuple[str, ...]
    locals: tuple[str, ...]
    layout: ModuleLayout


def fold(layouts: Mapping[str, ModuleLayout], module_names: Iterable[str]) -> list[Folded]:
    """Patterns that match exactly the modules of `layouts`, each with one layout, in model order.

    Args:
        layouts: module name -> layout, parameters by their own names.
        module_names: of the whole model.
    """
    names = list(module_names)
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layout in layouts.items():
        groups.setdefault((generalise(name), _key(layout)), []).append(name)
    patterns = [(pattern, found) for members in groups.values() for pattern, found in _over_layers(members, names)]
    merged: dict[tuple[str, str], list[tuple[str, list[str]]]] = {}
    for pattern, members in patterns:
        merged.setdefault((pattern.rpartition(".")[0], _key(layouts[members[0]])), []).append((pattern, members))
    order = {name: index for index, name in enumerate(names)}
    folded = [entry for alike in merged.values() for entry in _siblings(alike, names)]
    return [
        Folded(pattern, tuple(members), tuple(layouts[members[0]].parameters), _with_patterns(layouts[members[0]]))
        for pattern, members in sorted(folded, key=lambda entry: min(order[name] for name in entry[1]))
    ]


def _key(layout: ModuleLayout) -> str:
    return repr(attrs.evolve(layout, parameters=dict(sorted(layout.parameters.items()))))


def _exact(pattern: str, members: Iterable[str], names: Iterable[str]) -> bool:
    return {name for name in names if matches(pattern, name)} == set(members)


def _over_layers(members: list[str], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`layers.*.x` where all layers are alike, `layers.{0,2}.x` where some are, else one by one."""
    pattern = generalise(members[0])
    if len(members) > 1 and _exact(pattern, members, names):
        return [(pattern, members)]
    columns = list(zip(*(name.split(".") for name in members), strict=True))
    chosen = ".".join(segment[0] if len(set(segment)) == 1 else _alternatives(list(dict.fromkeys(segment))) for segment in columns)
    if _exact(chosen, members, names):
        return [(chosen, members)]
    return [(name, [name]) for name in members]


def _siblings(alike: list[tuple[str, list[str]]], names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """`{q,k,v}_proj` for neighbours with one layout."""
    if len(alike) == 1:
        return alike
    parent = alike[0][0].rpartition(".")[0]
    last = _alternatives([pattern.rpartition(".")[2] for pattern, _ in alike])
    pattern, members = f"{parent}.{last}" if parent else last, [name for _, found in alike for name in found]
    nested = any(sign in entry.rpartition(".")[2] for entry, _ in alike for sign in "*{")
    return alike if nested or not _exact(pattern, members, names) else [(pattern, members)]


def _alternatives(words: list[str]) -> str:
    if len(words) == 1:
        return words[0]
    parts = [word.split("_") for word in words]
    behind = 0
    while all(len(part) > behind + 1 for part in parts) and len({part[-1 - behind] for part in parts}) == 1:
        behind += 1
    end = parts[0][len(parts[0]) - behind :]
    short = ["_".join(part[: len(part) - behind]) for part in parts]
    return "_".join([f"{{{','.join(short)}}}", *end])


def _with_patterns(layout: ModuleLayout) -> ModuleLayout:
    """Parameters with one role in one pattern; those of `once` stand by their own names."""
    alike: dict[Role, list[str]] = {}
    for name, role in layout.parameters.items():
        alike.setdefault(role, []).append(name)
    parameters: dict[str, Role] = {}
    for role, names in alike.items():
        alone = [name for name in names if name in layout.once]
        together = [name for name in names if name not in layout.once]
        parameters |= dict.fromkeys(alone, role)
        if together:
            parameters[_alternatives(together)] = role
    return attrs.evolve(layout, parameters=parameters)


def source(layout: ModelLayout, *, model: str, measured: str, notes: Mapping[str, str], sequence_parallel: bool) -> str:
    """A Python module that declares `layout` for models of class `model`.

    Args:
        measured: with what, in words, for its docstring.
        notes: pattern -> evidence, for comments.
    """
    body: list[str] = []
    for pattern, module in layout.modules.items():
        if notes.get(pattern):
            body += textwrap.wrap(notes[pattern], _WIDTH - 8, initial_indent=" " * 8 + "# ", subsequent_indent=" " * 8 + "# ")
        body += _entry(pattern, module)
    text = "\n".join(body)
    constants = _constants(text)
    used = text + constants
    always = ("CapabilityError", "ModelLayout", "ModuleLayout", "ParallelPlan")
    imports = [*sorted({*always, *(name for name in ("Boundary", "Replica", "Shard", "Term") if f"{name}(" in used)}), "hookimpl"]
    between = "sharded along the sequence" if sequence_parallel else "whole"
    refused = "not plan.sequence_parallel" if sequence_parallel else "plan.sequence_parallel"
    units = ", ".join(f'"{unit}"' for unit in layout.units) + ("," if len(layout.units) == 1 else "")
    docstring = textwrap.wrap(f"How {model} lies on the tp axis, measured by `mixle infer-layout` ({measured}).", _WIDTH - 6)
    return _TEMPLATE.format(
        docstring="\n".join(docstring),
        sizes=_SIZES if "unit=" in text or "parts=" in text else "",
        imports=_imports(imports),
        constants=constants,
        model=model,
        refused=refused,
        between=between,
        sequence=sequence_parallel,
        body=text,
        units=f", units=({units})" if units else "",
    )


_SIZES = " The numbers of `unit` and `parts` are those of the measured configuration."

_TEMPLATE = '''"""{docstring}

Every parameter's local gradient was compared with one process before anybody reduced it. A comment
without a number is about the module's own code on slices. Prove changes, and other sizes of tp,
with `mixle verify`.{sizes}
"""

from __future__ import annotations

from typing import Any

{imports}

{constants}

@hookimpl
def declare_layout(model: Any, plan: ParallelPlan) -> ModelLayout | None:
    """Declare every parameter of a {model} on tp."""
    if type(model).__name__ != "{model}" or plan.tp == 1:
        return None
    if {refused}:
        raise CapabilityError(
            "{model} was measured with activations {between} between its blocks; "
            "set sequence_parallel={sequence}, or measure it the other way"
        )
    modules = {{
{body}
    }}
    return ModelLayout(axis="tp", modules=modules{units})
'''


def _imports(names: Sequence[str]) -> str:
    line = f"from mixle_core import {', '.join(names)}"
    if len(line) <= _WIDTH - 12:
        return line
    return "\n".join(["from mixle_core import (", *(f"    {name}," for name in names), ")"])


def _constants(text: str) -> str:
    lines = []
    for name, meaning, value in (
        ("ENTER", "backward: the sum of the ranks' terms", "Boundary(outside=WHOLE, inside=SHARED)"),
        ("LEAVE", "forward: the sum of the ranks' terms", "Boundary(outside=WHOLE, inside=Term())"),
    ):
        if name in text:
            lines.append(f"{name} = {value}  # {meaning}")
    rest = text + "".join(lines)
    first = [f'{name} = Replica("{kind}")' for name, kind in (("WHOLE", "complete"), ("SHARED", "partial")) if name in rest]
    return "\n".join([*first, *lines, ""]) if first or lines else ""


def _entry(pattern: str, module: ModuleLayout) -> list[str]:
    words = {
        "parameters": _dict({f'"{name}"': _role(role) for name, role in module.parameters.items()}),
        "inputs": _dict({_quoted(key): _boundary(found) for key, found in module.inputs.items()}),
        "output": [_boundary(module.output)] if module.output else [],
        "lookup": [_quoted(module.lookup)] if module.lookup else [],
        "once": ["(" + "".join(f"{_quoted(name)}, " for name in module.once).removesuffix(" " if len(module.once) == 1 else ", ") + ")"]
        if module.once
        else [],
        "sharded_dropout": ["True"] if module.sharded_dropout else [],
    }
    given = {name: value for name, value in words.items() if value}
    line = f'        "{pattern}": ModuleLayout({", ".join(f"{name}={_line(value)}" for name, value in given.items())}),'
    if len(line) <= _WIDTH:
        return [line]
    lines = [f'        "{pattern}": ModuleLayout(']
    for name, value in given.items():
        short = f"            {name}={_line(value)},"
        if len(short) <= _WIDTH or len(value) == 1:
            lines.append(short)
        else:
            lines += [f"            {name}={{", *(f"                {item}," for item in value), "            },"]
    return [*lines, "        ),"]


def _dict(items: Mapping[str, str]) -> list[str]:
    """Items of a dict display; empty for none."""
    return [f"{key}: {value}" for key, value in items.items()]


def _line(value: Sequence[str]) -> str:
    return "{" + ", ".join(value) + "}" if ": " in value[0] else value[0]


def _quoted(value: int | str) -> str:
    return str(value) if isinstance(value, int) else f'"{value}"'


def _role(role: Lie) -> str:
    if isinstance(role, Term):
        return "Term()"
    if isinstance(role, Replica):
        if role.ranks is not None:
            return f'Replica("{role.gradient}", ranks={role.ranks})'
        return "WHOLE" if role == _WHOLE else "SHARED"
    unit = f", unit={role.unit}" if role.unit != 1 else ""
    parts = f", parts={role.parts}" if role.parts else ""
    return f"Shard({role.dim}{unit}{parts})"


def _boundary(boundary: Boundary) -> str:
    if boundary == _ENTER:
        return "ENTER"
    if boundary == _LEAVE:
        return "LEAVE"
    return f"Boundary(outside={_role(boundary.outside)}, inside={_role(boundary.inside)})"

"""Turn what layout plugins declare into resolved facts about one model, or into an error that names the fault."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from mixle_core.errors import CapabilityError, LayoutError, explain_failure
from mixle_core.layout import (
    Layouts,
    ModelLayout,
    ModuleLayout,
    ParameterLayout,
    Replica,
    Role,
    Term,
    generalise,
    join,
    logical_name,
    matches,
    tied_names,
)
from mixle_core.ownership import Bid, describe_role, exactly_one
from mixle_core.plan import MODEL_AXES, ParallelPlan
from mixle_core.plugins import LoadedPlugins


def declared_layouts(plugins: LoadedPlugins, model: Any, plan: ParallelPlan) -> list[tuple[str, ModelLayout]]:
    """Ask `declare_layout` until a round declares nothing new; a plugin that answered is not asked again."""
    answers: list[tuple[str, ModelLayout]] = []
    waiting = list(plugins.labels)
    while True:
        roles = {name: layout.roles for name, layout in resolve_layouts(model, plan, answers).parameters.items()}
        answered = []
        for name in waiting:
            answer = plugins.ask_one(name, "declare_layout", model=model, plan=plan, declared=roles)
            if answer is None:
                continue
            answered.append(name)
            for layout in answer if isinstance(answer, tuple) else (answer,):
                if not isinstance(layout, ModelLayout):
                    raise plugins.misanswered(name, "declare_layout", layout, "ModelLayout or None")
                answers.append((plugins.labels[name], layout))
        if not answered:
            return answers
        waiting = [name for name in waiting if name not in answered]


def parameter_facts(model: Any, transparent: Iterable[str] = ()) -> dict[str, ParameterLayout]:
    """Logical name -> shape, dtype, ties and trainability, with no role declared yet."""
    return {
        name: ParameterLayout(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype),
            itemsize=parameter.element_size(),
            trainable=bool(parameter.requires_grad),
            aliases=aliases,
        )
        for name, (parameter, aliases) in tied_names(model, transparent).items()
    }


def resolve_layouts(model: Any, plan: ParallelPlan, declared: Iterable[tuple[str, ModelLayout]]) -> Layouts:
    """Match every declaration with the model.

    Args:
        declared: (plugin, layout) in the order in which they were given.

    Raises:
        LayoutError: an axis that is no model axis, a pattern that matches nothing, a parameter declared twice, tied names
            with different roles, a role that the parameter's shape cannot have.
        CapabilityError: a dimension whose units the axis does not divide.
    """
    declared = list(declared)
    transparent = tuple(dict.fromkeys(segment for _, layout in declared for segment in layout.transparent))
    parameters = parameter_facts(model, transparent)
    module_names = list(dict.fromkeys(logical_name(raw, transparent) for raw, _ in model.named_modules()))
    modules: dict[str, dict[str, ModuleLayout]] = {}
    units: list[str] = []
    for plugin, layout in declared:
        if layout.axis not in MODEL_AXES:
            known = f"expected one of {', '.join(MODEL_AXES)}; gradients are partial on data axes by themselves"
            raise LayoutError(f"{plugin} declares a layout for axis {layout.axis!r}: {known}")
        for pattern in layout.units:
            found = [name for name in module_names if matches(pattern, name)]
            if not found:
                raise _no_match(plugin, layout.axis, f"unit pattern {pattern!r}", pattern, module_names)
            units.extend(found)
    for axis in dict.fromkeys(layout.axis for _, layout in declared):
        on_axis = [(plugin, layout) for plugin, layout in declared if layout.axis == axis]
        parameters = _with_roles(parameters, plan, axis, on_axis, module_names)
        modules[axis] = _boundaries(axis, on_axis, module_names)
    both = [name for name, layout in parameters.items() if layout.expert and "tp" in layout.roles]
    if both:
        raise LayoutError(f"{both[0]} is declared on tp and on ep or etp, which are two views of the same ranks: experts have etp for tp")
    ordered = tuple(name for name in module_names if name in set(units))
    sequence = tuple(dict.fromkeys(logical_name(raw, transparent) for raw, _ in model.named_parameters(remove_duplicate=False)))
    return Layouts(parameters=parameters, modules=modules, units=ordered, transparent=transparent, sequence=sequence)


def _no_match(plugin: str, axis: str, what: str, pattern: str, names: Iterable[str]) -> LayoutError:
    nearest = difflib.get_close_matches(pattern, {generalise(name) for name in names if name}, n=1, cutoff=0.0)
    hint = f"; the nearest name is {nearest[0]!r}" if nearest else ""
    return LayoutError(f"{plugin} declares {what} for axis {axis!r}, which matches nothing in the model{hint}")


def _with_roles(
    parameters: Mapping[str, ParameterLayout],
    plan: ParallelPlan,
    axis: str,
    declared: list[tuple[str, ModelLayout]],
    module_names: list[str],
) -> dict[str, ParameterLayout]:
    """Add the roles on one axis; every name of a tied parameter counts, and they have to agree."""
    every_name = {alias: name for name, layout in parameters.items() for alias in (name, *layout.aliases)}
    bids = []
    for plugin, layout in declared:
        for pattern, module in layout.modules.items():
            for local, role in module.parameters.items():
                full = join(pattern, local)
                covered = [name for name in every_name if matches(full, name)]
                if not covered:
                    raise _no_match(plugin, axis, f"parameter pattern {full!r}", full, every_name)
                bids.append(Bid(f"{plugin} ({full})", covered, (plugin, role)))
            if not any(matches(pattern, name) for name in module_names):
                raise _no_match(plugin, axis, f"module pattern {pattern!r}", pattern, module_names)
    named = {name for bid in bids for name in bid.keys}
    chosen = exactly_one(
        sorted(named),
        bids,
        what=f"exactly one pattern declares a parameter on axis {axis!r}",
        way_out={"nobody": "", "several": "make the patterns disjoint, or leave one plugin out of MIXLE_PLUGINS"},
        several=LayoutError,
    )
    roles: dict[str, dict[str, tuple[str, Role]]] = {}
    for alias, bid in chosen.items():
        roles.setdefault(every_name[alias], {})[alias] = bid.value
    out = dict(parameters)
    for name, by_alias in roles.items():
        distinct = {role for _, role in by_alias.values()}
        if len(distinct) > 1:
            said = [f"{alias}: {describe_role(role)} by {plugin}" for alias, (plugin, role) in by_alias.items()]
            raise LayoutError(
                explain_failure(f"one tied parameter was declared with {len(distinct)} roles on {axis!r}", said, "declare equal roles")
            )
        plugin, role = next(iter(by_alias.values()))
        _check_role(parameters[name], role, plan, axis, plugin)
        out[name] = attrs.evolve(
            parameters[name],
            roles={**parameters[name].roles, axis: role},
            declared_by={**parameters[name].declared_by, axis: plugin},
        )
    return out


def _check_role(layout: ParameterLayout, role: Role, plan: ParallelPlan, axis: str, plugin: str) -> None:
    where = f"{plugin} declares {layout.name} with shape {list(layout.shape)} as {describe_role(role)} on {axis!r}"
    if isinstance(role, Replica):
        if role.ranks is not None and (not role.ranks or list(role.ranks) != sorted(set(role.ranks) & set(range(plan.size(axis))))):
            raise LayoutError(f"{where}: expected ranks from 0 to {plan.size(axis) - 1}, in order")
        return
    if not 0 <= role.dim < len(layout.shape):
        raise LayoutError(f"{where}: dim {role.dim} does not exist; expected 0 to {len(layout.shape) - 1}")
    extent = layout.shape[role.dim]
    if role.parts is not None and sum(role.parts) != extent:
        raise LayoutError(f"{where}: parts add up to {sum(role.parts)}, expected {extent}")
    for piece in role.parts or (extent,):
        if piece % role.unit:
            raise LayoutError(f"{where}: {piece} elements are not a whole number of units of {role.unit}")
        if (piece // role.unit) % plan.size(axis):
            raise CapabilityError(
                f"{layout.name}: dim {role.dim} has {piece // role.unit} {role.unit_name}s, which {axis}={plan.size(axis)} does not "
                f"divide (declared by {plugin}); choose {axis} from {', '.join(map(str, _divisors(piece // role.unit)))}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0][:8]


def _boundaries(axis: str, declared: list[tuple[str, ModelLayout]], module_names: list[str]) -> dict[str, ModuleLayout]:
    bids = [
        Bid(f"{plugin} ({pattern})", [n for n in module_names if matches(pattern, n)], module)
        for plugin, layout in declared
        for pattern, module in layout.modules.items()
        if module.executes
    ]
    for bid in bids:
        _check_boundaries(bid.bidder, bid.value)
    chosen = exactly_one(
        sorted({name for bid in bids for name in bid.keys}),
        bids,
        what=f"one pattern lays boundaries on a module on axis {axis!r}",
        way_out={"nobody": "", "several": "merge the two declarations into one pattern"},
        several=LayoutError,
    )
    return {name: bid.value for name, bid in chosen.items()}


def _check_boundaries(bidder: str, module: ModuleLayout) -> None:
    if any(isinstance(boundary.outside, Term) for boundary in (*module.inputs.values(), *filter(None, [module.output]))):
        raise LayoutError(f"{bidder}: an activation outside a module is a Replica or a Shard, never a Term")
    if module.output is None or not isinstance(module.output.inside, Term):
        if module.once:
            raise LayoutError(f"{bidder}: once={list(module.once)} needs an output that is a Term inside")
        return
    whole = [name for name, role in module.parameters.items() if isinstance(role, Replica) and name not in module.once]
    if whole:
        raise LayoutError(
            f"{bidder}: the output is a term of a sum, so {', '.join(whole)} would be added once by every rank; "
            f"name it in once=(...) with the role Replica('partial'), or shard it"
        )
    wrong = [name for name in module.once if module.parameters.get(name) != Replica("partial")]
    if wrong:
        raise LayoutError(
            f"{bidder}: {', '.join(wrong)} in once=(...) must be declared Replica('partial'): one rank has all of its gradient"
        )


def require_declared(layouts: Layouts, axis: str, plan: ParallelPlan) -> None:
    """Raise LayoutError, with lines to paste, when a parameter has no role on an active model axis."""
    parameters = layouts.parameters
    asked = [name for name, layout in parameters.items() if axis == "pp" or layout.expert == (axis in ("ep", "etp"))]
    missing = [name for name in asked if axis not in parameters[name].roles]
    if not missing:
        return
    modules: dict[str, dict[str, str]] = {}
    for module, _, local in (generalise(name).rpartition(".") for name in missing):
        modules.setdefault(module, {})[local] = f'"{local}": Replica("complete")'
    stub = [
        f'"{module}": ModuleLayout(parameters={{{", ".join(roles.values())}}}),  # or Replica("partial"), or Shard(dim)'
        for module, roles in modules.items()
    ]
    raise LayoutError(
        explain_failure(
            f"{len(missing)} of {len(parameters)} parameters are undeclared on axis {axis!r} of size {plan.size(axis)}",
            stub,
            f'put these lines into a ModelLayout(axis="{axis}", modules={{...}}) with the right roles, or install the layout plugin',
            limit=len(stub),
        )
    )

"""`explain`: who executes each axis and who reduces each parameter, without a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import nn

from mixle_core.declarations import declared_layouts, require_declared, resolve_layouts
from mixle_core.errors import CapabilityError
from mixle_core.layout import Layouts
from mixle_core.ownership import AxisClaim, Bid, Claim, OwnershipTable, Refusal, Row, arbitrate, exactly_one
from mixle_core.plan import MODEL_AXES, ParallelPlan
from mixle_core.plugins import LoadedPlugins
from mixle_core.runtime.initialise import refuse_foreign, with_units
from mixle_core.runtime.models import Plugins, loaded_plugins


@attrs.frozen(eq=False)
class Arbitration:
    """The pure part of set-up: who was asked, what was declared, who won."""

    plugins: LoadedPlugins
    layouts: Layouts
    table: OwnershipTable
    winners: Mapping[str, tuple[Claim, tuple[Row, ...]]]
    executors: Mapping[str, AxisClaim]
    refusals: tuple[tuple[str, Refusal], ...]


def arbitration(model: nn.Module, plan: ParallelPlan, backend: str | Sequence[str] | None, plugins: Plugins) -> Arbitration:
    """Ask every plugin and settle every axis and parameter, without a process group."""
    plugins = loaded_plugins(plugins)
    backends = (backend,) if isinstance(backend, str) else tuple(backend or ())
    refuse_foreign(model)
    layouts = with_units(model, resolve_layouts(model, plan, declared_layouts(plugins, model, plan)))
    executors, declined = _settle_axes(model, plan, layouts, plugins, backends)
    experts = any(layout.expert for layout in layouts.parameters.values())
    for axis in MODEL_AXES:
        if axis in plan.executed_axes or (axis == "etp" and experts and plan.size("etp") > 1):
            require_declared(layouts, axis, plan)
    claims: list[tuple[str, Claim]] = []
    refusals: list[tuple[str, Refusal]] = []
    for name, answer in plugins.ask("own_reduction", model=model, plan=plan, layouts=layouts):
        for item in answer if isinstance(answer, tuple) else (answer,):
            if isinstance(item, Refusal):
                refusals.append((name, item))
            elif isinstance(item, Claim):
                claims.append((name, item))
            else:
                raise plugins.misanswered(name, "own_reduction", item, "Claim, Refusal or None")
    table, winners = arbitrate(plan, layouts, claims, refusals, backends=backends, labels=plugins.labels)
    table = attrs.evolve(table, executors={axis: name for axis, (name, _) in executors.items()})
    return Arbitration(plugins, layouts, table, winners, {axis: claim for axis, (_, claim) in executors.items()}, (*declined, *refusals))


def _settle_axes(
    model: nn.Module, plan: ParallelPlan, layouts: Layouts, plugins: LoadedPlugins, backends: tuple[str, ...]
) -> tuple[dict[str, tuple[str, AxisClaim]], list[tuple[str, Refusal]]]:
    bids, refusals = [], []
    for name, answer in plugins.ask("own_axis", model=model, plan=plan, layouts=layouts) if plan.executed_axes else ():
        for item in answer if isinstance(answer, tuple) else (answer,):
            if isinstance(item, Refusal):
                refusals.append((name, item))
            elif not isinstance(item, AxisClaim):
                raise plugins.misanswered(name, "own_axis", item, "AxisClaim, Refusal or None")
            elif not backends or item.backend in backends:
                bids.append(Bid(plugins.labels[name], (item.axis,), (name, item)))
    preferred = [bid for bid in bids if not backends or _rank(bid, backends) == min(_rank(o, backends) for o in bids if o.keys == bid.keys)]
    chosen = exactly_one(
        plan.executed_axes,
        preferred,
        what=f"each axis that splits the forward needs exactly one executor (plan: {plan.describe()})",
        way_out={
            "nobody": "set the axis to 1, or install and enable a plugin that executes it"
            + (f" under backend {' or '.join(backends)}" if backends else ""),
            "several": "choose with backend=..., or leave one of them out of MIXLE_PLUGINS",
        },
        refusals=[(plugins.labels[name], refusal) for name, refusal in refusals],
        nobody=CapabilityError,
    )
    return {axis: bid.value for axis, bid in chosen.items()}, refusals


def _rank(bid: Bid, backends: tuple[str, ...]) -> int:
    """How far back in the order of preference an executor's backend stands."""
    return backends.index(bid.value[1].backend)


def explain(model: nn.Module, plan: ParallelPlan, *, backend: str | Sequence[str] | None = None, plugins: Plugins = None) -> OwnershipTable:
    """Return the ownership table of `model` under `plan`: pure, no process group, no GPU, the model may be on meta.

    Args:
        model: whole, unwrapped.
        backend: label, or labels in order of preference; None when only one claims.
        plugins: names to load instead of all installed ones; name -> module of further plugins beside them; or a `load_plugins(...)`.

    Raises:
        MixleError: whatever would stop `attach`, with the way out.
    """
    return arbitration(model, plan, backend, plugins).table

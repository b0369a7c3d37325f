"""Arbitration: who reduces each parameter, who executes each axis, and the table that says so."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs

from mixle_core.errors import CapabilityError, LayoutError, MixleError, OwnershipError, PluginError, explain_failure
from mixle_core.layout import Layouts, ParameterLayout, Replica, Role, generalise, is_held, num_holders
from mixle_core.plan import AXES, DATA_AXES, EXPERT_AXES, ParallelPlan

LOCAL_OWNER = "local"
"""Owner of every parameter without a pending axis: its gradient is final as it is."""

_HALF = frozenset({"torch.bfloat16", "torch.float16"})


def _name_set(value: Iterable[str]) -> frozenset[str]:
    return frozenset(value)


def _names(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


@attrs.frozen
class Refusal:
    """A plugin's answer when it could own or execute something in general but not under this plan."""

    reason: str
    remedy: str


@attrs.frozen(eq=False)
class Claim:
    """A bid to reduce named parameters over all their pending axes.

    Args:
        owner: called once, without arguments, when the claim wins; returns the object described in `mixle_core.runtime.Owner`.
        parameters: logical names.
        axes: axes the owner can reduce over; a pending axis outside them is an error.
        stored: axes over which the owner leaves gradient and optimizer state sharded.
        backend: label that the user may ask for.
        stages: how the owner's collectives split the axes, in order; empty for one flattened collective.
        averages: whether the owner averages over complete axes; otherwise it leaves their equal copies alone.
        whole: all of the parameters or none of them.
        final: also those of the parameters without a pending axis, whose gradients lie where only this owner finds them.
    """

    owner: Callable[[], Any]
    parameters: Collection[str] = attrs.field(converter=_name_set)
    axes: frozenset[str] = attrs.field(converter=_name_set)
    backend: str
    stored: tuple[str, ...] = attrs.field(default=(), converter=_names)
    stages: tuple[tuple[str, ...], ...] = ()
    averages: bool = False
    whole: bool = True
    final: bool = False


@attrs.frozen(eq=False)
class AxisClaim:
    """A bid to execute one model axis. `executor()` returns the object described in `mixle_core.runtime.AxisExecutor`."""

    axis: str
    executor: Callable[[], Any]
    backend: str


@attrs.frozen(eq=False)
class Bid:
    """One bidder's offer for some keys; `value` is what the winner of a key gets."""

    bidder: str
    keys: frozenset[str] = attrs.field(converter=_name_set)
    value: Any = None


def exactly_one(
    keys: Iterable[str],
    bids: Iterable[Bid],
    *,
    what: str,
    way_out: Mapping[str, str],
    refusals: Iterable[tuple[str, Refusal]] = (),
    nobody: type[MixleError] = OwnershipError,
    several: type[MixleError] = OwnershipError,
) -> dict[str, Bid]:
    """Return key -> its only bid. Serves patterns, axes, owners and optimizer routes.

    Args:
        what: the rule in words, such as "each trainable parameter needs exactly one owner".
        way_out: the remedy under "nobody" and under "several".
        refusals: (bidder, refusal) of those who were asked and declined; shown when nobody bids.

    Raises:
        MixleError: of the type `nobody` for a key without a bid, with every refusal's reason and remedy; of the type
            `several` for a key with two bids or more, with every bidder.
    """
    found: dict[str, list[Bid]] = {key: [] for key in keys}
    for bid in bids:
        for key in bid.keys & found.keys():
            found[key].append(bid)
    unclaimed = [key for key, offers in found.items() if not offers]
    if unclaimed:
        declined = [f"{bidder} declined: {refusal.reason}; {refusal.remedy}" for bidder, refusal in refusals]
        raise nobody(
            explain_failure(f"{what}; none for {len(unclaimed)} of {len(found)}", [*declined, *_by_pattern(unclaimed)], way_out["nobody"])
        )
    contested = {key: offers for key, offers in found.items() if len(offers) > 1}
    if contested:
        lines = [f"{key}: claimed by {' and '.join(bid.bidder for bid in offers)}" for key, offers in contested.items()]
        raise several(explain_failure(f"{what}; several for {len(contested)} of {len(found)}", lines, way_out["several"]))
    return {key: offers[0] for key, offers in found.items()}


def _by_pattern(names: Iterable[str]) -> list[str]:
    counted: dict[str, int] = {}
    for name in names:
        counted[generalise(name)] = counted.get(generalise(name), 0) + 1
    return [name if number == 1 else f"{name} ({number} of them)" for name, number in counted.items()]


@attrs.frozen
class Row:
    """Who reduces one trainable parameter, over what, and how.

    Args:
        pending: axes above 1 on which the parameter is a replica, in mesh order.
        reduced: those of them that the owner's collectives cover.
        operation: "sum", "mean" or "none".
        scale: factor on the sum: 1 over the product of the averaged complete axes.
        dtype: of the communication.
        stages: the collectives in order, each the axes it flattens.
        stored: axes over which gradient and state stay sharded.
        shape: global shape.
        local_shape: shape on one rank before `stored` cuts it.
        copies: ranks that hold the same values after the reduction.
        payload_bytes: handed to collectives by one rank in one update.
    """

    name: str
    owner: str
    backend: str
    roles: Mapping[str, Role]
    pending: tuple[str, ...]
    reduced: tuple[str, ...]
    operation: str
    scale: float
    dtype: str
    stages: tuple[tuple[str, ...], ...]
    stored: tuple[str, ...]
    group_size: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    param_dtype: str
    itemsize: int
    copies: int
    payload_bytes: int
    aliases: tuple[str, ...] = ()

    @property
    def model_replica_axes(self) -> tuple[str, ...]:
        """Pending axes whose role somebody declared; the first update checks these."""
        return tuple(axis for axis in self.pending if axis not in DATA_AXES)

    def held_by(self, plan: ParallelPlan, rank: int) -> bool:
        """Whether `rank` holds any of it: a parameter may live on some stages or expert ranks only."""
        return is_held(self.roles, {**plan.coordinates(rank), **plan.coordinates(rank, EXPERT_AXES)})

    def role_text(self) -> str:
        """The declared roles in a phrase, such as `tp: Shard(0)`."""
        return ", ".join(f"{axis}: {describe_role(role)}" for axis, role in self.roles.items()) or "-"

    def operation_text(self) -> str:
        """What is done over which axes, stage by stage, such as `sum over dp_shard then tp, kept sharded`."""
        stages = " then ".join(" x ".join(stage) for stage in self.stages)
        done = self.operation if self.operation == "none" else f"{self.operation} over {stages}"
        return done + (", kept sharded" if self.stored else "")

    def as_dict(self) -> dict[str, Any]:
        """Fields and values, ready for JSON."""
        fields = attrs.asdict(self, recurse=False)
        fields["roles"] = {axis: describe_role(role) for axis, role in self.roles.items()}
        return fields


def describe_role(role: Role) -> str:
    """`role` as a layout author writes it."""
    if isinstance(role, Replica):
        return f"Replica({role.gradient}{'' if role.ranks is None else f', ranks={list(role.ranks)}'})"
    detail = "" if role.unit == 1 else f", unit={role.unit}"
    return f"Shard({role.dim}{detail}{'' if role.parts is None else f', parts={list(role.parts)}'})"


@attrs.frozen
class OwnershipTable:
    """The rows of all trainable parameters, ordered by name, and the executors of the model axes."""

    plan: ParallelPlan
    rows: tuple[Row, ...]
    executors: Mapping[str, str] = attrs.field(factory=dict)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name or name in row.aliases:
                return row
        raise KeyError(name)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = [(name, row.owner, row.role_text(), row.operation_text()) for name, (row, *_) in self.by_pattern()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)

    @property
    def owners(self) -> tuple[str, ...]:
        """Owners in name order."""
        return tuple(sorted({row.owner for row in self.rows}))

    def as_dict(self) -> dict[str, Any]:
        """The whole table, ready for JSON."""
        return {
            "plan": self.plan.as_dict(),
            "executors": dict(self.executors),
            "rows": [row.as_dict() for row in self.rows],
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the table in canonical JSON."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()

    def by_pattern(self) -> list[tuple[str, list[Row]]]:
        """Rows that differ only in numeric name segments, together under their pattern."""
        grouped: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            key = (generalise(row.name), row.owner, row.operation, row.reduced, row.local_shape, row.role_text())
            grouped.setdefault(key, []).append(row)
        return [(rows[0].name if len(rows) == 1 else str(key[0]), rows) for key, rows in grouped.items()]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def pending_axes(plan: ParallelPlan, layout: ParameterLayout) -> tuple[str, ...]:
    """Axes on which several ranks hold a replica of the parameter. On data axes they do, unless declared otherwise."""
    roles = {axis: layout.roles.get(axis) for axis in (EXPERT_AXES if layout.expert else AXES) if plan.size(axis) > 1}
    replicas = [axis for axis, role in roles.items() if isinstance(role, Replica) or (role is None and axis in DATA_AXES)]
    return tuple(axis for axis in replicas if num_holders(roles[axis], plan.size(axis)) > 1)


def make_row(plan: ParallelPlan, layout: ParameterLayout, owner: str, claim: Claim) -> Row:
    """Write the row that `claim` gives one parameter.

    Raises:
        OwnershipError: when the claim, or its stages, do not cover a pending axis.
    """
    pending = pending_axes(plan, layout)
    missed = [axis for axis in pending if axis not in claim.axes]
    if missed:
        raise OwnershipError(
            f"{owner} claims {layout.name} but does not reduce over its pending axis {', '.join(missed)} "
            f"(pending: {', '.join(pending)}); way out: a claim covers every pending axis, or leave the parameter to another owner"
        )
    complete = [axis for axis in pending if isinstance(layout.roles.get(axis), Replica) and layout.roles[axis].gradient == "complete"]  # type: ignore[union-attr]
    reduced = tuple(axis for axis in pending if axis not in complete or claim.averages)
    held = {axis: num_holders(layout.roles.get(axis), plan.size(axis)) for axis in pending}
    averaged = math.prod(held[axis] for axis in complete) if claim.averages else 1
    stages = tuple(
        stage for stage in ([tuple(a for a in axes if a in reduced) for axes in claim.stages] if claim.stages else [reduced]) if stage
    )
    if sorted(axis for stage in stages for axis in stage) != sorted(reduced):
        raise OwnershipError(
            f"{owner} claims {layout.name} with stages {list(claim.stages)}, which do not cover each of {', '.join(reduced)} once; "
            "way out: every axis of a claim stands in one of its stages"
        )
    stored = tuple(axis for axis in claim.stored if axis in reduced)
    local_shape = layout.local_shape({axis: plan.size(axis) for axis in layout.roles})
    dtype, itemsize = ("torch.float32", 4) if layout.dtype in _HALF else (layout.dtype, layout.itemsize)
    payload, remaining = 0, math.prod(local_shape) * itemsize
    for stage in stages:
        payload += remaining
        if set(stage) & set(stored):
            remaining = math.ceil(remaining / math.prod(plan.size(axis) for axis in stage))
    return Row(
        name=layout.name,
        owner=owner,
        backend=claim.backend,
        roles={axis: role for axis, role in layout.roles.items() if plan.size(axis) > 1},
        pending=pending,
        reduced=reduced,
        operation="none" if not reduced else ("mean" if set(reduced) <= set(complete) else "sum"),
        scale=1.0 / averaged,
        dtype=dtype,
        stages=stages,
        stored=stored,
        group_size=math.prod(held[axis] for axis in reduced),
        shape=layout.shape,
        local_shape=local_shape,
        param_dtype=layout.dtype,
        itemsize=layout.itemsize,
        copies=math.prod(number for axis, number in held.items() if axis not in stored),
        payload_bytes=payload,
        aliases=layout.aliases,
    )


def arbitrate(
    plan: ParallelPlan,
    layouts: Layouts,
    claims: Iterable[tuple[str, Claim]],
    refusals: Iterable[tuple[str, Refusal]],
    *,
    backends: tuple[str, ...] = (),
    labels: Mapping[str, str] | None = None,
) -> tuple[OwnershipTable, dict[str, tuple[Claim, tuple[Row, ...]]]]:
    """Give every trainable parameter its only owner.

    Args:
        claims: (plugin, claim) of every plugin that bids.
        backends: backend labels in order of preference; the first one that owns everything wins. Empty: any may.
        labels: plugin -> name, distribution and version, for messages.

    Returns:
        The table, and per owner its claim and rows. An owner is named like its plugin; a further claim that the same
        plugin wins makes the owner `PLUGIN/2`.

    Raises:
        OwnershipError: no owner, several owners, or a claim that misses a pending axis.
    """
    shown = labels or {}
    claims = list(claims)
    if any(who == LOCAL_OWNER for who, _ in claims):
        raise PluginError(f"a plugin named {LOCAL_OWNER!r} claims parameters; that is the core's own owner; way out: rename the plugin")
    refusals = [(shown.get(who, who), refusal) for who, refusal in refusals]
    names = [n for n, layout in layouts.parameters.items() if layout.trainable]
    if not names:
        raise LayoutError("the model has no trainable parameter; set requires_grad on those that training should change")
    needing = {name for name in names if pending_axes(plan, layouts.parameters[name])}
    claiming = sorted({claim.backend for _, claim in claims})
    if backends and needing and not any(label in claiming for label in backends):
        known = f"backends that claim here: {', '.join(claiming)}" if claiming else "install a plugin of this backend, or change the plan"
        declined = [f"{bidder} declined: {refusal.reason}; {refusal.remedy}" for bidder, refusal in refusals]
        raise CapabilityError(explain_failure(f"backend {' or '.join(backends)}: no plugin of it owns {plan.describe()}", declined, known))
    failure: OwnershipError | None = None
    for label in backends or (None,):
        offered = [(who, claim) for who, claim in claims if label is None or claim.backend == label]
        final = {name for _, claim in offered if claim.final for name in claim.parameters}
        try:
            winners = exactly_one(
                [name for name in names if name in final or name in needing],
                [
                    Bid(shown.get(who, who), {n for n in claim.parameters if claim.final or n in needing}, (who, claim))
                    for who, claim in offered
                ],
                what="each trainable parameter needs exactly one owner",
                way_out={
                    "nobody": "install or enable a plugin that owns these axes, or change the plan as the refusals say",
                    "several": "choose with backend=..., or leave one of them out of MIXLE_PLUGINS",
                },
                refusals=refusals,
            )
            break
        except OwnershipError as error:
            failure = failure or error
    else:
        assert failure is not None
        raise failure
    unclaimed = Claim(owner=lambda: None, parameters=(), axes=frozenset(), backend=LOCAL_OWNER)
    rows = []
    owners: dict[Claim, str] = {}
    assigned: dict[str, tuple[Claim, list[Row]]] = {}
    for name in names:
        bid = winners.get(name)
        who, claim = bid.value if bid else (LOCAL_OWNER, unclaimed)
        if claim not in owners:
            earlier = sum(owner.partition("/")[0] == who for owner in owners.values())
            owners[claim] = f"{who}/{earlier + 1}" if earlier else who
        row = make_row(plan, layouts.parameters[name], owners[claim], claim)
        rows.append(row)
        assigned.setdefault(owners[claim], (claim, []))[1].append(row)
    for who, (claim, got) in assigned.items():
        lost = (set(claim.parameters) & set(names)) - {row.name for row in got}
        if claim.whole and lost:
            raise OwnershipError(
                f"{who} claims {len(claim.parameters)} parameters as a whole and gets {len(got)}; without it: {min(lost)}, which has no "
                "pending axis; way out: leave it out of the claim, or claim with whole=False"
            )
    table = OwnershipTable(plan=plan, rows=tuple(rows))
    return table, {who: (claim, tuple(got)) for who, (claim, got) in sorted(assigned.items())}

"""From the traces of the parallel model and of the reference to the layouts of the reference's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from mixle_core.audit.infer_modules import Experiment, Inside, produced, settled
from mixle_core.audit.infer_slices import SHARED, WHOLE, lie
from mixle_core.audit.infer_trace import OUTPUT, Place, Trace, Use
from mixle_core.layout import Boundary, Lie, ModuleLayout, Replica, Role, Shard, join, logical_name

Passed = Mapping[Place, tuple[torch.Tensor, torch.Tensor | None]]
"""Of one rank: place -> value and gradient there."""


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@attrs.define
class Boundaries:
    """Layouts of modules, what they are based on, and what no layout can say.

    Args:
        roles: of every parameter as the parallel model has it; those of copies beside slices are replaced by what their module's
            own code computes.
    """

    reference: nn.Module
    roles: dict[str, Role]
    number: int
    tolerance: float
    layouts: dict[str, ModuleLayout] = attrs.field(factory=dict)
    notes: dict[str, str] = attrs.field(factory=dict)
    refusals: list[str] = attrs.field(factory=list)
    _modules: dict[str, nn.Module] = attrs.field(factory=dict, init=False)
    _own: dict[str, dict[str, Role]] = attrs.field(factory=dict, init=False)
    _lies: dict[Place, Lie | None] = attrs.field(factory=dict, init=False)
    _within: dict[Place, Lie] = attrs.field(factory=dict, init=False)
    _hints: set[tuple[int, ...]] = attrs.field(factory=set, init=False)
    _trace: Trace = attrs.field(factory=Trace, init=False)

    def infer(self, traces: Sequence[Trace], passed: Sequence[Sequence[Passed]], outputs: Sequence[Lie]) -> None:
        """Fill `layouts`.

        Args:
            traces: of the reference, per batch.
            passed: per batch and rank, of the parallel model.
            outputs: per batch, how the model's output lies.
        """
        self._modules = {logical_name(raw): module for raw, module in self.reference.named_modules()}
        self._trace = traces[0]
        self._hints = {role.parts for role in self.roles.values() if isinstance(role, Shard) and role.parts}
        self._lies = self._all_lies(traces, passed)
        for full, role in self.roles.items():
            holder, _, local = full.rpartition(".")
            self._own.setdefault(holder, {})[local] = role
        self._units()
        for name in self._modules:
            self._convert(name)
        inside = {name: self._inside(name) for name in self._modules if self._is_cut(name)}
        for name in self._modules:
            found = inside.get(name)
            if name not in inside or found is not None:
                self._lay(name, found)
        self._leave(outputs[0])

    def _convert(self, name: str) -> None:
        """A module of copies whose hooks convert: ahead of its code where its own gradients are terms, else behind it, which is left
        to the modules that take its output.
        """
        if any(True for _ in self._modules[name].children()) or self._is_cut(name):
            return
        entering, place = self._places(name, inputs=True), (name, 0, OUTPUT)
        if {self._lies.get(entered) for entered in entering} != {WHOLE} or self._lies.get(place) != SHARED:
            return
        own = self._own.get(name, {}).values()
        if own and all(role == SHARED for role in own):
            self._within.update(dict.fromkeys(entering, SHARED))
        else:
            self._lies[place] = WHOLE

    def _is_cut(self, name: str) -> bool:
        return any(isinstance(role, Shard) for role in self._own.get(name, {}).values())

    def _places(self, name: str, *, inputs: bool) -> list[Place]:
        return [place for place in self._trace.uses if place[:2] == (name, 0) and (place[2] == OUTPUT) != inputs]

    def _all_lies(self, traces: Sequence[Trace], passed: Sequence[Sequence[Passed]]) -> dict[Place, Lie | None]:
        """How each tensor lies outside its module; None where batches or calls differ, or where it is none of the kinds."""
        found: dict[Place, Lie | None] = {}
        for trace, ranks in zip(traces, passed, strict=True):
            for place, use in trace.uses.items():
                if not all(place in held for held in ranks):
                    continue
                lies = lie(*self._values(place, ranks), use.value, use.gradient, self._hints, self.tolerance)
                first = (place[0], 0, place[2])  # every call of a module has the layout of its first
                for key in {place, first}:
                    found[key] = lies if found.setdefault(key, lies) == lies else None
        return found

    def _values(self, place: Place, ranks: Sequence[Passed]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        return [held[place][0] for held in ranks], [held[place][1] for held in ranks]

    def _units(self) -> None:
        """A slice that its consumer sees as a further dim may be cut between the elements of that dim alone."""
        for use in self._trace.uses.values():
            for name, _, end in use.sources if use.unit is not None else ():
                for local, role in self._own.get(name, {}).items():
                    if end == OUTPUT and isinstance(role, Shard) and role.dim == 0 and role.parts is None and use.unit is not None:
                        self._own[name][local] = attrs.evolve(role, unit=use.unit)
                        self.notes.setdefault(name, f"units of {use.unit}: what takes the output sees them as a dim of their own")

    def _floating(self, name: str) -> list[Place]:
        return [place for place in self._places(name, inputs=True) if self._trace.uses[place].edge is not None]

    def _inside(self, name: str) -> Inside | None:
        """What the module's own code computes on slices; None after a refusal."""
        if name not in self._trace.calls:
            self.refusals.append(f"module {name!r} holds slices and is not called in the forward, so how its input lies is not seen")
            return None
        seen: dict[int | str, Lie] = {}
        for place in self._floating(name):
            found = self._lies.get(place)
            if found is None:
                self.refusals.append(f"{_said(place)} is neither whole, nor a slice, nor a term of the reference's on the ranks")
                return None
            seen[place[2]] = found
        prefix = f"{name}." if name else ""
        roles = {full.removeprefix(prefix): role for full, role in self.roles.items() if full.startswith(prefix)}
        experiment = Experiment(self._modules[name], roles, self._trace.calls[name], seen, number=self.number, tolerance=self.tolerance)
        found_inside = experiment.run()
        if found_inside is None:
            self.refusals.append(
                f"module {name!r}: the reference's own forward on slices of its weights does not give what it gives on whole ones: "
                f"{experiment.said}"
            )
        return found_inside

    def _lay(self, name: str, inside: Inside | None) -> None:
        inputs = {}
        for place in self._floating(name):
            within = inside.inputs[place[2]] if inside else self._within.get(place, settled(self._lies.get(place)))
            outside = self._outside(place, self._trace.uses[place])
            if within is not None and outside is not None and outside != within:
                inputs[place[2]] = Boundary(outside=outside, inside=within)
        own = dict(self._own.get(name, {}))
        if inside:
            own |= inside.roles
            for local, role in inside.roles.items():
                self._explain(name, local, role, inside)
        layout = ModuleLayout(
            parameters=own,
            inputs=inputs,
            output=self._output(name, inside),
            lookup=inside.lookup if inside else None,
            once=inside.once if inside else (),
            sharded_dropout=self._draws(name),
        )
        if layout.parameters or layout.executes:
            self.layouts[name] = layout

    def _explain(self, name: str, local: str, role: Role, inside: Inside) -> None:
        full = join(name, local)
        if local in inside.once:
            self.notes[name] = f"{local}: added once, by the first rank, so that all of its gradient is there"
        elif self.roles[full] != role:
            self.notes[name] = f"{local}: the module's own code on slices makes its gradient {_gradient(role)}"
        self.roles[full] = role

    def _outside(self, place: Place, use: Use) -> Lie | None:
        seen = settled(self._lies.get(place))
        if seen is None:
            return None
        cutting = any(isinstance(self.roles[name], Shard) for name in use.parameters)
        found = produced(seen, [settled(self._lies.get(_first(s))) for s in use.sources], direct=use.direct, cutting=cutting)
        if isinstance(found, str):
            self.refusals.append(f"{_said(place)}: {found}")
            return None
        return found

    def _output(self, name: str, inside: Inside | None) -> Boundary | None:
        place = (name, 0, OUTPUT)
        use = self._trace.uses.get(place)
        outside = settled(self._lies.get(place))
        if use is None or use.edge is None:
            return None
        if inside is None:
            came = [settled(self._lies.get(_first(source))) for source in use.sources] if use.direct else []
            within = came[0] if came else outside
        else:
            within = inside.output
            if outside is None:
                self.refusals.append(f"{_said(place)} is neither whole, nor a slice, nor a term of the reference's on the ranks")
        return Boundary(outside=outside, inside=within) if outside is not None and within is not None and outside != within else None

    def _draws(self, name: str) -> bool:
        module = self._modules[name]
        drawing = isinstance(module, _DROPOUT) and module.p > 0
        return drawing and any(isinstance(self._lies.get(place), Shard) for place in self._places(name, inputs=True))

    def _leave(self, output: Lie) -> None:
        """What the model returns is converted where it leaves its last module, when the model's own code does it."""
        use = self._trace.output
        if use is None or not use.direct or not isinstance(output, Replica):
            return
        (source,) = use.sources
        name, seen = source[0], self._lies.get(_first(source))
        if source[2] == OUTPUT and isinstance(seen, Shard):
            layout = self.layouts.get(name, ModuleLayout())
            within = layout.output.inside if layout.output else seen
            self.layouts[name] = attrs.evolve(layout, output=Boundary(outside=WHOLE, inside=within))


def _first(place: Place) -> Place:
    return place[0], 0, place[2]


def _said(place: Place) -> str:
    what = "the output" if place[2] == OUTPUT else f"input {place[2]!r}"
    return f"{what} of {place[0] or 'the model'}"


def _gradient(role: Role) -> str:
    return "a term of a sum" if role == SHARED else "whole"

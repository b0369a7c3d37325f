"""`infer_layout`: from a model that somebody parallelised, and the same weights in one process, to its declaration."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mixle_core.audit.infer_boundaries import Boundaries
from mixle_core.audit.infer_roles import Measurement, ParameterFinding, Weight, finding, gathered, weight_of
from mixle_core.audit.infer_trace import Forward, every_parameter, held
from mixle_core.audit.layout_source import Folded, fold, source
from mixle_core.declarations import require_declared, resolve_layouts
from mixle_core.errors import MixleError, UsageError, explain_failure
from mixle_core.layout import Boundary, ModelLayout, ModuleLayout, Role, Shard, generalise
from mixle_core.plan import ParallelPlan
from mixle_core.runtime.initialise import repeated_blocks
from mixle_core.runtime.models import forward_names

TOLERANCE = 1e-4
"""Relative error up to which values are equal."""

_MORE_BATCHES = 3
"""Further batches that are tried while gradients of copies are zero."""


@attrs.frozen
class InferredLayout:
    """A measured layout of a reference model, or why there is none.

    Args:
        model: class name of the reference.
        size: ranks that it was measured on.
        findings: logical name -> what was found.
        layout: None when something was refused.
        refusals: a line for each thing that no layout can say, with the numbers.
        notes: pattern of `layout` -> evidence, in words.
        measured: with what, in words.
        sequence_parallel: whether activations between the repeated blocks are sharded along the sequence.
    """

    model: str
    size: int
    findings: Mapping[str, ParameterFinding]
    layout: ModelLayout | None
    refusals: tuple[str, ...]
    notes: Mapping[str, str]
    measured: str
    sequence_parallel: bool = False

    def source(self) -> str:
        """The layout as a Python module that declares it: a plugin, or a file for `--layout`.

        Raises:
            UsageError: there is none; the refusals are in the text.
        """
        if self.layout is None:
            raise UsageError(explain_failure("no layout can say what was found", self.refusals, "change the model, or write it by hand"))
        return source(self.layout, model=self.model, measured=self.measured, notes=self.notes, sequence_parallel=self.sequence_parallel)


def run_model(model: nn.Module, batch: Any) -> torch.Tensor:
    """What a model returns for a batch, or for a mapping of keyword arguments: logits where it has them, else its first tensor."""
    if isinstance(batch, Mapping):
        output: Any = model(**batch)
    else:
        output = model(input_ids=batch) if "input_ids" in forward_names(model) else model(batch)
    output = output.logits if hasattr(output, "logits") else output
    output = output[0] if isinstance(output, (tuple, list)) else getattr(output, "last_hidden_state", output)
    if not isinstance(output, torch.Tensor):
        raise UsageError(f"infer_layout: the model returned {type(output).__name__}; pass forward=, which returns a tensor")
    return output


def infer_layout(
    model: nn.Module,
    reference: nn.Module,
    draw: Callable[[int], Any],
    *,
    batches: int = 2,
    forward: Forward = run_model,
    tolerance: float = TOLERANCE,
    measured: str = "",
) -> InferredLayout:
    """Measure what every parameter and activation of a parallel model is, and say it as a layout. Collective; every rank gets it.

    Args:
        model: as some framework parallelised it over all ranks of the default process group.
        reference: the same weights in one process, on every rank.
        draw: index -> a batch, equal on every rank.
        batches: how many have to agree.
        forward: runs either model on a batch; its result may be whole on every rank or a slice. `run_model` without one.
        tolerance: relative error of what is equal.
        measured: words about the framework, for the source.

    Raises:
        UsageError: fewer than two ranks or batches; a model whose output is not that of the reference.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise UsageError("infer_layout: one rank splits nothing; run it on at least two")
    if batches < 2:
        raise UsageError(f"infer_layout: batches={batches}; one can agree by accident, so at least 2 are needed")
    weights = gathered({name: held(parameter) for name, parameter in every_parameter(model).items()})
    whole = {name: held(parameter) for name, parameter in every_parameter(reference).items()}
    found = {name: weight_of(name, [theirs.get(name) for theirs in weights], values) for name, values in whole.items()}
    refused = [line for line in found.values() if isinstance(line, str)]
    unknown = sorted({name for theirs in weights for name in theirs} - whole.keys())
    refused += [f"{name}: the reference has no parameter of this name" for name in unknown]
    words = f"{measured or _framework(model)}, torch {torch.__version__}, Python {platform.python_version()}"
    if refused:
        findings = {name: ParameterFinding(None, line) for name, line in found.items() if isinstance(line, str)}
        return InferredLayout(type(reference).__name__, len(weights), findings, None, tuple(refused), {}, words)
    measurement = Measurement(model, reference, forward, tolerance)
    names = list(whole)
    for index in range(batches + _MORE_BATCHES):
        if index < batches or measurement.undecided(names):
            measurement.add(draw(index))
    return _agreed(_decided(measurement, {name: entry for name, entry in found.items() if not isinstance(entry, str)}, words))


def _framework(model: nn.Module) -> str:
    """The distribution that a model's class is from, with its version where it has one."""
    module = type(model).__module__.partition(".")[0]
    try:
        return f"{module} {importlib.metadata.version(module)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{type(model).__module__}.{type(model).__qualname__}"


def _agreed(mine: InferredLayout) -> InferredLayout:
    """What the first rank concludes: rounding must not let ranks differ."""
    told = [mine]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _decided(measurement: Measurement, weights: Mapping[str, Weight], words: str) -> InferredLayout:
    findings = {name: finding(measurement, name, weight) for name, weight in weights.items()}
    refusals = [f"{name}: {found.evidence}" for name, found in findings.items() if found.role is None]
    reference, size = measurement.reference, dist.get_world_size()
    kind = type(reference).__name__
    if refusals:
        return InferredLayout(kind, size, findings, None, tuple(refusals), {}, words)
    roles = {name: found.role for name, found in findings.items() if found.role is not None}
    boundaries = Boundaries(reference, roles, size, measurement.tolerance)
    boundaries.infer(measurement.traces, measurement.passed, measurement.outputs)
    findings = {name: _revised(found, boundaries.roles[name]) for name, found in findings.items()}
    folded = fold(boundaries.layouts, [name for name, _ in reference.named_modules()])
    layout = ModelLayout(
        axis="tp",
        modules={entry.pattern: entry.layout for entry in folded},
        units=dict.fromkeys(map(generalise, repeated_blocks(reference))),
    )
    outsides = [b.outside for entry in folded for b in _boundaries(entry.layout)]
    along = any(isinstance(outside, Shard) and outside.dim != -1 for outside in outsides)
    refusals = boundaries.refusals or _checked(reference, layout, size, sequence_parallel=along)
    return InferredLayout(
        kind,
        size,
        findings,
        None if refusals else layout,
        tuple(refusals),
        {entry.pattern: _note(entry, findings, boundaries.notes) for entry in folded},
        f"{words}, {size} ranks, {len(measurement.traces)} batches",
        along,
    )


def _boundaries(module: ModuleLayout) -> list[Boundary]:
    return [*module.inputs.values(), *filter(None, [module.output])]


def _checked(reference: nn.Module, layout: ModelLayout, size: int, *, sequence_parallel: bool) -> list[str]:
    """What the core itself has to say against the layout."""
    plan = ParallelPlan(tp=size, sequence_parallel=sequence_parallel)
    try:
        layouts = resolve_layouts(reference, plan, [("the inferred layout", layout)])
        require_declared(layouts, "tp", plan)
    except MixleError as error:
        return [str(error)]
    return [
        f"module {pattern!r} would need a slice of dim {b.outside.dim} turned into one of dim {b.inside.dim}, which no executor of tp does"
        for pattern, module in layout.modules.items()
        for b in _boundaries(module)
        if isinstance(b.outside, Shard) and isinstance(b.inside, Shard)
    ]


def _revised(found: ParameterFinding, role: Role) -> ParameterFinding:
    if found.role == role:
        return found
    return ParameterFinding(role, f"{found.evidence}; on slices of its module's weights {role}")


def _note(entry: Folded, findings: Mapping[str, ParameterFinding], notes: Mapping[str, str]) -> str:
    """Evidence for one pattern: that of its first parameter, and what was noted about its module."""
    said = [note for module in entry.members if (note := notes.get(module))][:1]
    module = entry.members[0]
    own = [f"{module}.{local}" if module else local for local in entry.locals]
    return "; ".join([*[findings[name].evidence for name in own if name in findings][:1], *said])

"""`mixle infer-layout` on one rank."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from mixle_core.audit import InferredLayout, infer_layout
from mixle_core.cli.inputs import random_input
from mixle_core.cli.running import finish_processes
from mixle_core.errors import UsageError
from mixle_core.ownership import describe_role
from mixle_core.plan import ParallelPlan
from mixle_core.runtime.groups import start_processes
from mixle_core.runtime.models import callable_named


def run_infer(plan: ParallelPlan, options: dict[str, Any]) -> int:
    """Build both models, measure, and write the layout's source; 1 when something was found that no layout says."""
    start_processes(plan)
    reference = _built(options["reference"], "--reference", plan.tp)
    words = ""
    if options["plan_spec"]:
        model = _parallelised(_built(options["reference"], "--reference", plan.tp), options["plan_spec"], plan.tp)
        words = f"parallelize_module with {options['plan_spec']}"
    else:
        model = _built(options["target"], "TARGET", plan.tp)
    make, _ = random_input(reference, options["rows"], options["length"], "infer-layout")

    def draw(index: int) -> torch.Tensor:
        return make(torch.Generator().manual_seed(options["seed"] * 1_000_003 + index))

    found = infer_layout(model, reference, draw, batches=options["batches"], measured=words)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _show(found, options)
    finish_processes()
    return 1 if found.refusals else 0


def _built(spec: str, what: str, tp: int) -> nn.Module:
    function = callable_named(spec, what)
    found = function(tp=tp) if "tp" in inspect.signature(function).parameters else function()
    if not isinstance(found, nn.Module):
        raise UsageError(f"{what}: the callable returned {type(found).__name__}; expected a torch.nn.Module")
    return found


def require_sound(options: dict[str, Any]) -> None:
    """Raise UsageError for what can be seen to be wrong before any process starts."""
    if bool(options["target"]) == bool(options["plan_spec"]):
        raise UsageError("infer-layout: give TARGET, which builds the parallel model, or --plan, which parallelises the reference")
    callable_named(options["reference"], "--reference")
    if options["target"]:
        callable_named(options["target"], "TARGET")
    else:
        _styles(options["plan_spec"])
    if options["output"] and not Path(options["output"]).parent.is_dir():
        raise UsageError(f"--output {options['output']}: there is no directory {Path(options['output']).parent}")


def _styles(spec: str) -> dict[str, ParallelStyle]:
    """The dict that `--plan` names."""
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"--plan {spec!r}: expected module:name of a dict")
    try:
        styles = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--plan {spec}: {error}") from error
    if not isinstance(styles, dict) or not all(isinstance(style, ParallelStyle) for style in styles.values()):
        raise UsageError(f"--plan {spec} is a {type(styles).__name__}; expected a dict from patterns to torch's ParallelStyle")
    return styles


def _parallelised(model: nn.Module, spec: str, tp: int) -> nn.Module:
    """`model` under a plan for the forward, by torch's own `parallelize_module`."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (tp,))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = parallelize_module(model, mesh, _styles(spec))
    lost = [str(warning.message).partition(":")[0] for warning in told if "could not be resolved" in str(warning.message)]
    if lost:
        raise UsageError(f"--plan {spec}: {lost[0]}; its patterns follow torch's parallelize_module")
    return made


def _show(found: InferredLayout, options: dict[str, Any]) -> None:
    source = None if found.refusals else found.source()
    output = options["output"]
    if source is not None and output:
        try:
            Path(output).write_text(source)
        except OSError as error:
            raise UsageError(f"--output {output} could not be written: {error.strerror or error}") from error
    if options["as_json"]:
        findings = {
            name: {"role": None if entry.role is None else describe_role(entry.role), "evidence": entry.evidence}
            for name, entry in found.findings.items()
        }
        click.echo(json.dumps({"passed": not found.refusals, "refusals": found.refusals, "findings": findings, "source": source}))
        return
    if source is None:
        click.echo(f"no layout: {len(found.refusals)} found that no role or boundary says")
        for line in found.refusals:
            click.echo(f"  {line}")
    elif output:
        assert found.layout is not None
        proof = f"mixle verify --model {options['reference']} --tp {options['tp']} --layout {output}"
        along = " --sequence-parallel" if found.sequence_parallel else ""
        click.echo(f"{output}: {len(found.findings)} parameters in {len(found.layout.modules)} patterns; prove it: {proof}{along}")
    else:
        click.echo(source, nl=False)

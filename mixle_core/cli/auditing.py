"""`mixle audit` on one rank."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import attrs
import click
import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from mixle_core.audit import AuditReport, Groups, Verdict, audit
from mixle_core.cli.inputs import random_input
from mixle_core.cli.report import console
from mixle_core.cli.running import finish_processes
from mixle_core.errors import UsageError
from mixle_core.plan import ParallelPlan
from mixle_core.runtime.groups import start_processes
from mixle_core.runtime.models import callable_named


def run_audit(plan: ParallelPlan, options: dict[str, Any]) -> int:
    """Build both models, run windows of every number of microbatches, and show what is wrong; 1 when anything is."""
    start_processes(plan)
    data_rank, data_size = plan.coordinates(_rank())["dp_replicate"], plan.dp_replicate
    reference = _built(options["reference"], "--reference", plan)
    model = _built(options["target"], "TARGET", plan)
    if not isinstance(reference, nn.Module) or not isinstance(model, nn.Module):
        odd = "--reference" if not isinstance(reference, nn.Module) else "TARGET"
        raise UsageError(f"{odd}: the callable returned no torch.nn.Module; expected a model")
    make, loss = random_input(reference, options["rows"] * options["dp"], options["length"], "audit")

    def draw(index: int) -> torch.Tensor:
        return make(torch.Generator().manual_seed(options["seed"] * 1_000_003 + index))

    groups = {axis: sorted({plan.group_ranks(rank, [axis]) for rank in range(plan.world_size)}) for axis in ("tp", "dp_replicate")}
    named: Groups = {axis.removesuffix("_replicate"): blocks for axis, blocks in groups.items() if len(blocks[0]) > 1}
    window = partial(_window, model, loss=loss, data_rank=data_rank, data_size=data_size, put_off=options["sync"] == "last")
    alone = partial(_window, reference, loss=loss, data_rank=0, data_size=1, put_off=False)
    reports = [audit(window, alone, [draw(index) for index in range(number)], groups=named) for number in options["microbatches"]]
    passed = not any(report.wrong for report in reports)
    if _rank() == 0:
        _show(reports, passed, as_json=options["as_json"])
    finish_processes()
    return 0 if passed else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _built(spec: str, what: str, plan: ParallelPlan) -> Any:
    function = callable_named(spec, what)
    takes = inspect.signature(function).parameters
    sizes = {"tp": plan.tp, "dp": plan.dp_replicate}
    return function(**{name: size for name, size in sizes.items() if name in takes})


def _window(
    model: nn.Module, batches: Sequence[torch.Tensor], *, loss: Any, data_rank: int, data_size: int, put_off: bool
) -> Mapping[str, torch.Tensor | None]:
    """One accumulation window: the mean over microbatches of the mean over this data rank's tokens, as most loops have it."""
    model.zero_grad(set_to_none=True)
    for index, batch in enumerate(batches):
        with ExitStack() as stack:
            if put_off:
                stack.enter_context(_sync(model, now=index == len(batches) - 1))
            value, tokens = loss(model, batch.chunk(data_size)[data_rank])
            (value / tokens / len(batches)).backward()
    gradients = {name: None if p.grad is None else p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {name: None if g is None else g.clone() for name, g in gradients.items()}


def _sync(model: Any, *, now: bool) -> AbstractContextManager[Any]:
    """Reduce in this backward, or put it off, by whatever the model has for it."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    if not now and hasattr(model, "no_sync"):
        return model.no_sync()  # type: ignore[no-any-return]
    return nullcontext()


def _plain(verdict: Verdict) -> dict[str, Any]:
    """For JSON, which knows no infinity and no NaN: they become null."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in attrs.asdict(verdict).items()}


def _show(reports: Sequence[AuditReport], passed: bool, *, as_json: bool) -> None:
    if as_json:
        found = [{"microbatches": r.microbatches, "wrong": {n: _plain(v) for n, v in r.wrong.items()}} for r in reports]
        click.echo(json.dumps({"passed": passed, "windows": found}, allow_nan=False))
        return
    for report in reports:
        title = f"{report.microbatches} microbatch{'es' if report.microbatches > 1 else ''}"
        if not report.wrong:
            console().print(f"{title}: all {len(report.verdicts)} gradients right, largest error {report.error:.1e}")
            continue
        table = Table(title=f"{title}: {len(report.wrong)} of {len(report.verdicts)} gradients wrong", title_justify="left")
        for column in ("parameter", "what it is", "ratio", "error", "evidence"):
            table.add_column(column, overflow="fold")
        for name, verdict in report.wrong.items():
            ratio = "-" if verdict.ratio is None else f"{verdict.ratio:.4g}"
            table.add_row(name, verdict.kind, ratio, f"{verdict.error:.3g}", verdict.evidence)
        console().print(table)

"""Verification on ranks, and what commands on ranks share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import click
import torch
import torch.distributed as dist
from torch import nn

from mixle_core.audit import CellReport, VerifyReport, cells, verify, verify_matrix
from mixle_core.audit.matrix import TOLERANCE
from mixle_core.audit.verification import Batch
from mixle_core.cli.inputs import random_input
from mixle_core.cli.options import backends, load
from mixle_core.cli.report import cell_line, console, verify_table
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import LoadedPlugins
from mixle_core.runtime.contracts import Loss


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def finish_processes() -> None:
    """Wait for the other ranks, then leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def verified(
    plan: ParallelPlan,
    loaded: LoadedPlugins,
    build: Callable[[], nn.Module],
    *,
    backend: tuple[str, ...] | None,
    as_json: bool,
    seed: int = 0,
    rows: int = 2,
    length: int = 32,
    clip: float = 1.0,
    tolerance: float | None = None,
    strict: bool = False,
) -> bool:
    """Compare `plan` with one process over three updates, a short window between two full ones; the first rank shows the errors.

    The batches are random token ids, or random rows for a model without an embedding.
    """
    report = _report(plan, loaded, build, backend=backend, seed=seed, rows=rows, length=length, clip=clip, strict=strict)
    limit = TOLERANCE[plan.precision] if tolerance is None else tolerance
    passed = report.passed(limit)
    if _is_first() and as_json:
        click.echo(json.dumps({"passed": passed, "tolerance": limit, "error": report.error, **attrs.asdict(report)}))
    elif _is_first():
        console().print(verify_table(report))
        console().print(f"{'verified' if passed else 'WRONG'}: largest error {report.error:.1e}, tolerance {limit:.0e}")
        for cause in {update.cause for update in report.updates if update.cause and not passed}:
            console().print(f"the worst gradient is {cause}")
    return passed


def _report(
    plan: ParallelPlan,
    loaded: LoadedPlugins,
    build: Callable[[], nn.Module],
    *,
    backend: tuple[str, ...] | None,
    seed: int,
    rows: int,
    length: int,
    clip: float,
    strict: bool,
) -> VerifyReport:
    batch, loss = _input_for(build, seed, rows, length)
    full = plan.num_backwards
    return verify(
        build,
        plan,
        loss=loss,
        batch=batch,
        windows=[full, max(1, full // 2), full],
        max_grad_norm=clip or None,
        seed=seed,
        backend=backend,
        plugins=loaded,
        strict=strict,
    )


def _input_for(build: Callable[[], nn.Module], seed: int, rows: int, length: int) -> tuple[Batch, Loss]:
    """Random input that the model takes, and a loss over what it returns."""
    draw, loss = random_input(build(), rows, length, "verify")

    def batch(update: int, backward: int, data_rank: int) -> torch.Tensor:
        return draw(torch.Generator().manual_seed(hash((seed, update, backward, data_rank)) % 2**63))

    return batch, loss


def _run_matrix(plan: ParallelPlan, loaded: LoadedPlugins, build: Callable[[], nn.Module], options: dict[str, Any]) -> bool:
    """Every cell of the matrix; the first rank shows each as it comes."""
    batch, loss = _input_for(build, options["seed"], options["rows"], options["length"])

    def show(found: CellReport) -> None:
        if _is_first() and not options["as_json"]:
            click.echo(cell_line(found))

    reports = verify_matrix(
        build,
        list(cells(plan, full=options["matrix"] == "full")),
        loss=loss,
        batch=batch,
        tolerance=options["tolerance"],
        seed=options["seed"],
        backend=backends(options["backend"]),
        plugins=loaded,
        done=show,
        strict=options["strict"],
    )
    passed = all(found.passed for found in reports)
    if _is_first() and options["as_json"]:
        click.echo(json.dumps({"passed": passed, "cells": [attrs.asdict(found) for found in reports]}))
    elif _is_first():
        ran = [found for found in reports if found.report is not None]
        click.echo(f"{'verified' if passed else 'WRONG'}: {len(ran)} of {len(reports)} cells of {plan.describe()} against one process")
    return passed


def run_verify(plan: ParallelPlan, options: dict[str, Any]) -> int:
    """`mixle verify` on one rank."""
    loaded, build = load(options["model_spec"])
    if options["matrix"]:
        passed = _run_matrix(plan, loaded, build, options)
        finish_processes()
        return 0 if passed else 1
    wanted = {name: options[name] for name in ("as_json", "seed", "rows", "length", "clip", "tolerance", "strict")}
    passed = verified(plan, loaded, build, backend=backends(options["backend"]), **wanted)
    finish_processes()
    return 0 if passed else 1

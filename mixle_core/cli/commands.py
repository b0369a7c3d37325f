"""The commands themselves; each reads its options and hands over to one function."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from mixle_core.cli.checkpoints import checkpoint
from mixle_core.errors import MixleError, UsageError
from mixle_core.plugins import ALLOW_LIST, allowed_by_environment, installed_plugins, require_installed


class _Commands(click.Group):
    """The commands of the core, and those that installed distributions add."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, in order."""
        from mixle_core.cli.extension import added_commands

        return sorted({*super().list_commands(ctx), *added_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import only what is asked for."""
        from mixle_core.cli.extension import added_commands, load_command

        own = super().get_command(ctx, cmd_name)
        points = None if own else added_commands().get(cmd_name)
        return load_command(points, _with_plan) if points else own

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A broken command of some distribution does not take the help of the others with it."""
        rows = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
                rows.append((name, command.get_short_help_str(90) if command else ""))
            except MixleError as error:
                rows.append((name, f"broken: {error}"))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Say where a missing command may come from."""
        if args and not args[0].startswith("-") and args[0] not in (known := self.list_commands(ctx)):
            raise UsageError(f"no command {args[0]!r}; there are {', '.join(known)}; others come with distributions that add them")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="mixle-core", prog_name="mixle")
def cli() -> None:
    """Distributed PyTorch training with every gradient declared, arbitrated, executed once and auditable."""


cli.add_command(checkpoint)


@cli.command()
@click.option("--check", is_flag=True, help="Import each plugin in a process of its own and say which fail.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(check: bool, as_json: bool) -> int:
    """List the installed plugins without importing any."""
    rows = []
    require_installed(allowed_by_environment() or ())
    for plugin in installed_plugins():
        state = "enabled" if plugin.enabled else "left out by MIXLE_PLUGINS"
        if check and plugin.enabled:
            state = _import_alone(plugin.name)
        rows.append({"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version, "state": state})
    broken = any(str(row["state"]).startswith("broken") for row in rows)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    elif not rows:
        click.echo("no plugin is installed; install the backends and layouts you use: pip install mixle-NAME")
    else:
        from rich.table import Table

        from mixle_core.cli.report import console

        table = Table("name", "distribution", "version", "state")
        for row in rows:
            table.add_row(*map(str, row.values()))
        console().print(table)
    return 1 if broken else 0


_TOLD = 3
_IMPORT = f"""
import sys
from mixle_core.errors import MixleError
from mixle_core.plugins import load_plugins
try:
    load_plugins([sys.argv[1]])
except MixleError as error:
    print(error, file=sys.stderr)
    sys.exit({_TOLD})
"""


def _import_alone(name: str) -> str:
    env = {**os.environ, ALLOW_LIST: name}  # alone, whatever else the allow-list asks for
    done = subprocess.run([sys.executable, "-c", _IMPORT, name], capture_output=True, text=True, check=False, timeout=300, env=env)
    if done.returncode == 0:
        return "enabled, imports"
    said = done.stderr.strip().splitlines() or ["ended without a word"]
    # the plugin's own error is told whole; of a process that died, the last line is left
    return "broken: " + (" ".join(line.strip() for line in said) if done.returncode == _TOLD else said[-1])


def _plan_command(function: Any) -> Any:
    from mixle_core.cli.options import plan_options

    return cli.command()(plan_options(function))


def _with_plan(command: click.Command) -> click.Command:
    """A command of another distribution, with the options of a plan before its own, run on the ranks of that plan."""
    from mixle_core.cli.extension import on_rank
    from mixle_core.cli.options import plan_options

    def run(**options: Any) -> int:
        return _on_ranks(functools.partial(on_rank, command), options)

    return click.command(command.name, help=command.help, params=list(command.params))(plan_options(run))


@_plan_command
@click.option("--by-parameter", is_flag=True, help="One line for each parameter instead of each pattern.")
@click.option("--save", type=click.Path(dir_okay=False), default=None, help="Write the table to a file, .md or .json.")
def explain(**options: Any) -> int:
    """Show who reduces what under a plan, and what it costs: no GPU, no processes."""
    from mixle_core.cli.options import backends, load, pop_plan
    from mixle_core.cli.report import console, explain_json, human_bytes, memory_per_rank, ownership_table, save_table
    from mixle_core.runtime.arbitration import arbitration

    plan = pop_plan(options)
    loaded, build = load(options["model_spec"])
    model = build()
    started = time.perf_counter()
    won = arbitration(model, plan, backends(options["backend"]), loaded)
    seconds = time.perf_counter() - started
    memory = memory_per_rank(plan, won.layouts, won.table)
    if options["save"]:
        save_table(won.table, Path(options["save"]))
    if options["as_json"]:
        click.echo(json.dumps(explain_json(won, memory, seconds), indent=1))
        return 0
    out = console()
    out.print(ownership_table(won.table, by_parameter=options["by_parameter"]))
    for axis, executor in won.table.executors.items():
        out.print(f"{axis} is executed by {executor}")
    for who, refusal in won.refusals:  # every axis and parameter has its one: why others are none needs no way out
        out.print(f"{who} declined: {refusal.reason}")
    payload = sum(row.payload_bytes for row in won.table.rows)
    out.print(
        f"per rank: parameters {human_bytes(memory.parameters)}, gradients {human_bytes(memory.gradients)}, "
        f"AdamW {human_bytes(memory.optimizer)}, together {human_bytes(memory.total)}, without activations; "
        f"gradient payload {human_bytes(payload)} per update"
    )
    out.print(
        f"{plan.world_size} ranks, {sum(p.numel for p in won.layouts.parameters.values()):,} parameters; "
        f"planned in {seconds:.2f} s; digest {won.table.digest[:16]}"
    )
    return 0


@_plan_command
@click.option("--clip", type=float, default=1.0, show_default=True, help="Clip the global norm to this; 0 leaves it.")
@click.option("--tolerance", type=float, default=None, help="Largest error that passes. [default: 1e-5, 3e-2 for bf16]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--rows", type=click.IntRange(1), default=4, show_default=True, help="Rows of each microbatch on each data rank.")
@click.option("--length", type=click.IntRange(2), default=32, show_default=True, help="Tokens of a row.")
@click.option(
    "--matrix",
    type=click.Choice(["windows", "full"]),
    default=None,
    help="Try windows of 1, 4 and fewer backwards with and without clipping; full: also bf16, frozen, tied and unused parameters, "
    "and activation checkpointing.",
)
@click.option("--strict", is_flag=True, help="Compare the collectives of every update with the table, too.")
def verify(**options: Any) -> int:
    """Train a plan for three updates beside one process and compare gradients, norms and parameters."""
    from mixle_core.cli.running import run_verify

    return _on_ranks(run_verify, options)


def _numbers(ctx: Any, option: Any, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{value!r}: expected whole numbers of at least 1, such as 1,2,4")
    return numbers


@cli.command()
@click.argument("target")
@click.option("--reference", required=True, metavar="MODULE:CALLABLE", help="Builds the same weights in one process.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks that split the model: neighbours.")
@click.option("--dp", type=click.IntRange(1), default=1, show_default=True, help="Ranks with rows of their own.")
@click.option("--microbatches", callback=_numbers, default="1,2,4", show_default=True, help="Backwards of each window to try.")
@click.option(
    "--sync",
    type=click.Choice(["every", "last"]),
    default="every",
    show_default=True,
    help="Reduce in every backward, or put it off to the last one of a window (no_sync, set_requires_gradient_sync).",
)
@click.option("--rows", type=click.IntRange(1), default=2, show_default=True, help="Rows of a microbatch on each data rank.")
@click.option("--length", type=click.IntRange(2), default=16, show_default=True, help="Tokens of a row.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def audit(**options: Any) -> int:
    """Find wrong gradients in a model that somebody else parallelised.

    TARGET (module:callable) builds the parallel model on every rank, in a process group that is there already; it may take `tp` and `dp`.
    Every gradient of a window is compared with one process, rank by rank, and what is wrong is named.
    """
    from mixle_core.plan import ParallelPlan
    from mixle_core.runtime.launch import is_rank, launch, limit_threads

    plan = ParallelPlan(dp_replicate=options["dp"], tp=options["tp"])
    if is_rank() or plan.world_size == 1:
        from mixle_core.cli.auditing import run_audit

        limit_threads()
        return run_audit(plan, options)
    from mixle_core.runtime.models import callable_named

    callable_named(options["target"], "TARGET")
    callable_named(options["reference"], "--reference")
    result = launch(["-m", "mixle_core.cli.rank", *sys.argv[1:]], plan.world_size)
    if result.message:
        raise _Failed(result.message, result.exit_code)
    return result.exit_code


@cli.command("infer-layout")
@click.argument("target", required=False)
@click.option("--plan", "plan_spec", default=None, metavar="MODULE:NAME", help="Instead of TARGET: a dict for parallelize_module.")
@click.option("--reference", required=True, metavar="MODULE:CALLABLE", help="Builds the same weights in one process.")
@click.option("--tp", type=click.IntRange(2), default=2, show_default=True, help="Ranks that split the model.")
@click.option("--output", type=click.Path(dir_okay=False), default=None, help="Write the layout here instead of printing it.")
@click.option("--batches", type=click.IntRange(2), default=2, show_default=True, help="Random batches that have to agree.")
@click.option("--rows", type=click.IntRange(1), default=2, show_default=True, help="Rows of a batch.")
@click.option("--length", type=click.IntRange(2), default=16, show_default=True, help="Tokens of a row.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def infer_layout(**options: Any) -> int:
    """Measure a model that is split already, and write its layout.

    TARGET (module:callable) builds the parallel model on every rank, in a process group that is there already; it may take `tp`. What
    each local gradient is (whole, a term of a sum, of a slice) and how activations lie is compared with one process, and written as a
    Python file for --layout or for a plugin.
    """
    from mixle_core.plan import ParallelPlan
    from mixle_core.runtime.launch import is_rank, launch, limit_threads

    plan = ParallelPlan(tp=options["tp"])
    if is_rank():
        from mixle_core.cli.inferring import run_infer

        limit_threads()
        return run_infer(plan, options)
    from mixle_core.cli.inferring import require_sound

    require_sound(options)
    result = launch(["-m", "mixle_core.cli.rank", *sys.argv[1:]], plan.world_size)
    if result.message:
        raise _Failed(result.message, result.exit_code)
    return result.exit_code


def _on_ranks(run: Any, options: dict[str, Any]) -> int:
    """Run here when this is a rank or the plan is one process; else launch this same command on all ranks."""
    from mixle_core.cli.options import load, pop_plan
    from mixle_core.runtime.arbitration import arbitration
    from mixle_core.runtime.launch import is_rank, launch, limit_threads

    plan = pop_plan(options)
    if is_rank() or plan.world_size == 1:
        limit_threads()
        return int(run(plan, options))
    # what is wrong with the plan or the model shows here, before any process starts
    from mixle_core.cli.options import backends

    loaded, build = load(options["model_spec"])
    arbitration(build(), plan, backends(options["backend"]), loaded)
    result = launch(["-m", "mixle_core.cli.rank", *sys.argv[1:]], plan.world_size)
    if result.message:
        raise _Failed(result.message, result.exit_code)
    return result.exit_code


class _Failed(click.ClickException):
    """What a rank said, with its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    def show(self, file: Any = None) -> None:
        click.echo(f"mixle: {self.message}", err=True)


__all__ = ["MixleError", "cli"]

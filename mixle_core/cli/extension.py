"""Commands that other distributions add: found by entry point, run on the ranks of a plan."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from mixle_core.errors import PluginError, UsageError
from mixle_core.ownership import OwnershipTable
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import LoadedPlugins

if TYPE_CHECKING:
    from torch import nn

COMMAND_GROUP = "mixle.commands"
"""Entry points of this group are `click.Command` objects whose callback takes a CommandContext and its own options."""


@attrs.frozen(eq=False)
class CommandContext:
    """What a command of another distribution gets, on every rank.

    Args:
        plan, backend: from the command line.
        plugins: loaded for the model.
        build: makes the model that the command line names, equal on every call.
        as_json: print JSON.
        first_rank: whether this rank speaks.
        verify: `(seed, rows, length, clip) -> passed`: compare the plan with one process, and show the errors.
    """

    plan: ParallelPlan
    backend: tuple[str, ...] | None
    plugins: LoadedPlugins
    build: Callable[[], nn.Module]
    as_json: bool
    first_rank: bool
    verify: Callable[..., bool]

    def show_table(self, table: OwnershipTable) -> None:
        """Print the ownership table, on the first rank and not among JSON."""
        from mixle_core.cli.report import console, ownership_table

        if self.first_rank and not self.as_json:
            console().print(ownership_table(table))

    def save_table(self, table: OwnershipTable, path: str) -> None:
        """Write the ownership table as Markdown (`.md`) or JSON (`.json`), on the first rank."""
        from mixle_core.cli.report import save_table

        if self.first_rank:
            save_table(table, Path(path))


def added_commands() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """Names of the commands that installed distributions add -> who adds them, without importing any."""
    found: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=COMMAND_GROUP):
        found.setdefault(point.name, {}).setdefault(point.value, point)
    return {name: [*found[name].values()] for name in sorted(found)}


def load_command(points: list[importlib.metadata.EntryPoint], wrap: Callable[[click.Command], click.Command]) -> click.Command:
    """Import one added command and give it the plan's options.

    Raises:
        PluginError: two distributions add it, its import fails, or it is no command.
    """
    if len(points) > 1:
        names = [f"{p.dist.name} {p.dist.version}" if p.dist else "unknown" for p in points]
        raise PluginError(f"two distributions add the command {points[0].name!r}: {' and '.join(names)}; way out: uninstall one of them")
    point = points[0]
    who = f"the command {point.name!r} of {point.dist.name if point.dist else 'unknown'}"
    try:
        command = point.load()
    except Exception as error:
        raise PluginError(f"{who} failed to import: {type(error).__name__}: {error}; way out: repair it, or uninstall it") from error
    if not isinstance(command, click.Command) or command.callback is None:
        raise PluginError(f"{who} is a {type(command).__name__}; expected a click.Command with a callback")
    return wrap(command)


def on_rank(command: click.Command, plan: ParallelPlan, options: dict[str, Any]) -> int:
    """Run an added command on this rank."""
    from mixle_core.cli.options import backends, load
    from mixle_core.cli.running import finish_processes, verified

    loaded, build = load(options.pop("model_spec"))
    backend, as_json = backends(options.pop("backend")), options.pop("as_json")
    first = int(os.environ.get("RANK", "0")) == 0
    context = CommandContext(
        plan=plan,
        backend=backend,
        plugins=loaded,
        build=build,
        as_json=as_json,
        first_rank=first,
        verify=functools.partial(verified, plan, loaded, build, backend=backend, as_json=as_json),
    )
    assert command.callback is not None
    status = command.callback(context, **options)
    finish_processes()
    if status is not None and not isinstance(status, int):
        raise UsageError(f"the command returned {type(status).__name__}; expected an exit code or None")
    return status or 0

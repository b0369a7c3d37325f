"""What several commands take: the plan, the model, and how both are read."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mixle_core.errors import UsageError
from mixle_core.hookspecs import PROJECT
from mixle_core.plan import PRECISIONS, ParallelPlan
from mixle_core.plugins import LoadedPlugins, installed_plugins

if TYPE_CHECKING:  # `mixle plugins` and `--help` come without torch
    from torch import nn

_SIZES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp")


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a ParallelPlan, the model and the backend."""
    for name in reversed(_SIZES):
        option = f"--{name.replace('_', '-')}"
        command = click.option(
            option, name, type=int, default=None if name == "etp" else 1, show_default=name != "etp", help=f"Ranks along {name}."
        )(command)
    more = [
        click.option("--sequence-parallel", is_flag=True, help="Shard activations between blocks along the sequence over tp."),
        click.option("--microbatches", type=int, default=1, show_default=True, help="Backwards that one batch is cut into."),
        click.option("--accumulation", type=int, default=1, show_default=True, help="Batches in one update."),
        click.option("--activation-checkpointing", is_flag=True, help="Recompute each unit in the backward."),
        click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True),
        click.option("--backend", default=None, help="Backend label, or several by preference, comma-separated."),
        click.option(
            "--model", "model_spec", required=True, metavar="NAME:SIZE", help="A plugin's model, such as NAME:tiny, or module:callable."
        ),
        click.option(
            "--layout", metavar="FILE", expose_value=False, callback=_keep_layout, help="A Python file that declares the model's layout."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    ]
    for option_ in reversed(more):
        command = option_(command)
    return command


def pop_plan(options: dict[str, Any]) -> ParallelPlan:
    """Take the plan's options out of `options` and make the plan."""
    sizes = {name: options.pop(name) for name in _SIZES}
    return ParallelPlan(
        **sizes,
        sequence_parallel=options.pop("sequence_parallel"),
        microbatches=options.pop("microbatches"),
        gradient_accumulation_steps=options.pop("accumulation"),
        activation_checkpointing=options.pop("activation_checkpointing"),
        precision=options.pop("precision"),
    )


def backends(text: str | None) -> tuple[str, ...] | None:
    """The labels in a comma-separated list, in order of preference."""
    return None if text is None else tuple(label.strip() for label in text.split(",") if label.strip())


_LAYOUT = "mixle_core.layout_file"


def _keep_layout(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    """Remember the file for `load`: commands of other distributions get their options without knowing of it."""
    ctx.meta[_LAYOUT] = value


def layout_file(path: str) -> tuple[str, Any]:
    """Import a file of hooks as a plugin; returns its name, which is the file's, and the module.

    Raises:
        UsageError: no such file, one whose import fails or that has no hook, or a name that an installed plugin has.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"--layout {path}: there is no such file; `mixle infer-layout --output {path}` writes one")
    name = file.stem
    if name in {plugin.name for plugin in installed_plugins()}:
        raise UsageError(f"--layout {path}: a plugin named {name!r} is installed; give the file another name")
    found = importlib.util.spec_from_file_location(f"mixle_layout_{name}", file)
    if found is None or found.loader is None:
        raise UsageError(f"--layout {path}: expected a Python file, with a name that ends in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"--layout {path} failed to import: {type(error).__name__}: {error}") from error
    if not any(hasattr(value, f"{PROJECT}_impl") for value in vars(module).values()):
        raise UsageError(f"--layout {path} has no hook; expected a function declare_layout marked with @hookimpl of mixle_core")
    return name, module


def load(spec: str) -> tuple[LoadedPlugins, Callable[[], nn.Module]]:
    """The plugins, the file of `--layout` beside them, and what builds the model that `--model` names.

    Raises:
        MixleError: nothing of that name.
    """
    from mixle_core.runtime.models import model_builder

    context = click.get_current_context(silent=True)
    path = context.meta.get(_LAYOUT) if context else None
    return model_builder(spec, dict([layout_file(path)]) if path else None, what="--model")

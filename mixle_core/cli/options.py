"""What several commands take: the plan, the model, and how both are read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mixle_core.errors import MixleError, UsageError
from mixle_core.plan import PRECISIONS, ParallelPlan
from mixle_core.plugins import LoadedPlugins, installed_plugins, load_plugins

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


def load(spec: str) -> tuple[LoadedPlugins, Callable[[], nn.Module]]:
    """Load the plugins and find what builds the model.

    Args:
        spec: `NAME:REST` of an installed plugin, else `module:callable` importable from here.

    Raises:
        MixleError: nothing of that name, or what it returns is no module.
    """
    name, colon, rest = spec.partition(":")
    if not colon or not rest:
        raise UsageError(f"--model {spec!r}: expected NAME:SIZE of a plugin, or module:callable")
    installed = {plugin.name for plugin in installed_plugins()}
    plugins = load_plugins(required=[name] if name in installed else [])
    build = _from_plugin(plugins, name, rest) if name in plugins else _from_callable(name, rest, sorted(installed))

    def checked() -> nn.Module:
        from torch import nn

        model = build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {spec!r} gave {type(model).__name__}; expected a torch.nn.Module")
        return model

    return plugins, checked


def _from_plugin(plugins: LoadedPlugins, name: str, rest: str) -> Callable[[], Any]:
    def build() -> Any:
        model = plugins.ask_one(name, "build_model", spec=rest)
        if model is None:
            raise UsageError(f"plugin {name!r} builds no models; name one that does, or module:callable")
        return model

    return build


def _from_callable(module: str, attribute: str, installed: list[str]) -> Callable[[], Any]:
    sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name != module.split(".", maxsplit=1)[0] and error.name != module:
            raise UsageError(f"--model {module}:{attribute}: importing {module} failed: {error}") from error
        known = ", ".join(installed) or "none"
        raise UsageError(
            f"--model {module}:{attribute}: {module!r} is neither a plugin (installed: {known}) nor an importable module"
        ) from error
    except AttributeError as error:
        raise UsageError(f"--model {module}:{attribute}: module {module!r} has no {attribute!r}") from error
    if not callable(found):
        raise UsageError(f"--model {module}:{attribute}: {type(found).__name__} cannot be called")
    return _caught(found, f"{module}:{attribute}")


def _caught(function: Callable[[], Any], spec: str) -> Callable[[], Any]:
    def build() -> Any:
        try:
            return function()
        except MixleError:
            raise
        except Exception as error:  # the user's code: its message is what helps
            raise UsageError(f"--model {spec} raised {type(error).__name__}: {error}") from error

    return build

"""What several commands take: the plan, the model, and how both are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mixle_core.plan import PRECISIONS, ParallelPlan
from mixle_core.plugins import LoadedPlugins

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
    """The plugins, and what builds the model that `--model` names.

    Raises:
        MixleError: nothing of that name.
    """
    from mixle_core.runtime.models import model_builder

    return model_builder(spec, what="--model")

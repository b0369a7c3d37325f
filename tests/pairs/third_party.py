"""Small distributions as third parties would write them: rivals, twins, fillers, and those that are broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "a plugin of the tests"
requires-python = ">=3.11"
dependencies = {dependencies}

[project.entry-points."{group}"]
{entries}

[tool.hatch.build.targets.wheel]
only-include = {files}
"""

CLAIMS = """
from mixle_core import AxisClaim, Claim, hookimpl


@hookimpl
def own_reduction(plan, layouts):
    from mixle_core.testing import SumOwner

    if plan.world_size == 1:
        return None
    axes = {{"dp_replicate", "dp_shard", "tp"}}
    owner = lambda: SumOwner(plan, layouts.transparent)
    return Claim(owner=owner, parameters=layouts.trainable, axes=axes, backend="{backend}", whole=False)


@hookimpl
def own_axis(plan, layouts):
    return AxisClaim(axis="tp", executor=object, backend="{backend}") if plan.tp > 1 else None
"""

LAYOUT = """
from mixle_core import ModelLayout, ModuleLayout, Replica, hookimpl


@hookimpl
def declare_layout(model, plan):
    return ModelLayout(axis="tp", modules={modules})
"""

FILLS = """
from mixle_core import hookimpl


@hookimpl
def init_params(model, layouts, seed):
    if "model.norm.weight" not in layouts.parameters:
        return None
    model.weight.data.fill_({value})
    return frozenset({{"model.norm.weight"}})
"""

ANSWERS = """
from mixle_core import hookimpl


@hookimpl
def {hook}({arguments}):
    return {answer}
"""


@attrs.frozen
class Facts:
    """One distribution. `sources`: entry name -> text of the module it names, or an object reference of another distribution."""

    name: str
    version: str
    sources: dict[str, str]
    dependencies: tuple[str, ...] = ("mixle-core>=0.1,<0.2",)
    group: str = "mixle"


def answers(hook: str, answer: str, arguments: str = "plan") -> str:
    """A module whose only hook gives one answer."""
    return ANSWERS.format(hook=hook, arguments=arguments, answer=answer)


DISTRIBUTIONS = [
    # their names stand before and after all native ones
    Facts("mixle-ahead", "1.0", {"ahead": CLAIMS.format(backend="ahead")}),
    Facts("mixle-ahead", "1.1", {"ahead": CLAIMS.format(backend="ahead")}),
    Facts("mixle-yonder", "3.0", {"yonder": CLAIMS.format(backend="yonder")}),
    Facts("mixle-twin", "2.0", {"twin": CLAIMS.format(backend="torch_native")}),
    Facts(
        "mixle-again",
        "0.3",
        {"again": LAYOUT.format(modules='{"model.norm": ModuleLayout(parameters={"weight": Replica("complete")})}')},
    ),
    Facts(
        "mixle-tail",
        "0.4",
        {"tail": LAYOUT.format(modules='{"model.norm": ModuleLayout(parameters={"weight": Replica("partial")})}')},
    ),
    Facts("mixle-fill-early", "1.0", {"fill-early": FILLS.format(value=2.0)}),
    Facts("mixle-fill-late", "1.5", {"fill-late": FILLS.format(value=3.0)}),
    Facts("mixle-broken", "0.7", {"broken": "raise RuntimeError('no such device')"}),
    Facts("mixle-misspelt", "0.8", {"misspelt": answers("own_reducton", "None")}),
    Facts("mixle-defaulting", "0.8", {"defaulting": answers("own_reduction", "None", "plan, layouts=None")}),
    Facts("mixle-faulty", "0.8", {"faulty": answers("own_axs", "None") + answers("own_reduction", "None", "plan, world")}),
    Facts("mixle-nonsense-claim", "0.9", {"nonsense-claim": answers("own_reduction", "'all of them'")}),
    Facts("mixle-nonsense-axis", "0.9", {"nonsense-axis": answers("own_axis", "['tp']")}),
    Facts("mixle-nonsense-layout", "0.9", {"nonsense-layout": answers("declare_layout", "{'model.norm.weight': 'complete'}")}),
    Facts("mixle-nonsense-fill", "0.9", {"nonsense-fill": answers("init_params", "['model.norm.weight']", "seed")}),
    # another distribution's plugin under its name, and one module under two names
    Facts("impostor", "7.0", {"torch-ddp": answers("own_reduction", "None")}),
    Facts("mixle-alias", "1.0", {"ddp-alias": "mixle_torch_ddp.plugin"}, ("mixle-core>=0.1,<0.2", "mixle-torch-ddp")),
    # a command that mixle-lm adds too
    Facts("mixle-trainer", "1.0", {"train": "raise RuntimeError('imported')"}, group="mixle.commands"),
]


def write_project(into: Path, facts: Facts) -> Path:
    """Write what a wheel is built from; return its folder."""
    folder = into / f"{facts.name}-{facts.version}"
    folder.mkdir(parents=True)
    module = facts.name.replace("-", "_")
    entries: dict[str, str] = {}
    files: list[str] = []
    for entry, source in facts.sources.items():
        refers = "\n" not in source and " " not in source
        entries[entry] = source if refers else module
        text = "" if refers else source
        (folder / f"{module}.py").write_text(text)
        files = [f"{module}.py"]
    values: dict[str, Any] = {
        "name": facts.name,
        "version": facts.version,
        "dependencies": list(facts.dependencies),
        "group": facts.group,
        "entries": "\n".join(f'{name} = "{value}"' for name, value in entries.items()),
        "files": files,
    }
    (folder / "pyproject.toml").write_text(PROJECT.format(**values))
    return folder

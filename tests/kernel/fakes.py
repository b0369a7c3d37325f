"""Models without torch: just what the kernel reads of a module and of a parameter."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mixle_core import Claim, Layouts, ModelLayout, ModuleLayout, ParallelPlan, Replica, Role, Shard
from mixle_core.declarations import resolve_layouts

ITEMSIZES = {"torch.float64": 8, "torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2}


class Parameter:
    """Shape, dtype and trainability; two names that hold the same object are tied."""

    def __init__(self, *shape: int, dtype: str = "torch.float32", requires_grad: bool = True) -> None:
        self.shape = shape
        self.dtype = dtype
        self.requires_grad = requires_grad

    def element_size(self) -> int:
        return ITEMSIZES[self.dtype]


class Model:
    """Parameters by raw name, in registration order; the modules are the prefixes of their names, parents first."""

    def __init__(self, parameters: Mapping[str, Parameter], modules: Sequence[str] = ()) -> None:
        self.parameters = dict(parameters)
        self.modules = dict.fromkeys([""])
        for name in (*parameters, *(f"{module}." for module in modules)):
            segments = name.split(".")[:-1]
            self.modules.update(dict.fromkeys(".".join(segments[: i + 1]) for i in range(len(segments))))

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Parameter]]:
        seen: set[int] = set()
        for name, parameter in self.parameters.items():
            if not remove_duplicate or id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for name in self.modules:
            yield name, object()


def declare(model: Model, plan: ParallelPlan, *layouts: ModelLayout) -> Layouts:
    """Resolve `layouts` as if a plugin called `author` had declared them."""
    return resolve_layouts(model, plan, [("author", layout) for layout in layouts])


def roles(axis: str = "tp", **by_name: Role) -> ModelLayout:
    """A layout of top-level modules: `roles(up=Shard(0))` declares `up.weight`."""
    return ModelLayout(axis=axis, modules={name: ModuleLayout(parameters={"weight": role}) for name, role in by_name.items()})


DDP = {"axes": {"dp_replicate", "tp"}, "backend": "torch_native"}
FSDP = {
    "axes": {"dp_shard", "dp_replicate", "tp"},
    "stages": (("dp_shard",), ("dp_replicate",), ("tp",)),
    "stored": ("dp_shard",),
    "backend": "torch_native",
}
TP = {"axes": {"tp"}, "backend": "torch_native"}


def model() -> Model:
    """One parameter of each kind: cut, partial (half precision), complete, and one in double precision."""
    return Model(
        {
            "up.weight": Parameter(8, 4),
            "norm.weight": Parameter(4, dtype="torch.bfloat16"),
            "gate.weight": Parameter(4, 4),
            "wide.weight": Parameter(16, dtype="torch.float64"),
        }
    )


def layouts(plan: ParallelPlan) -> Layouts:
    """Their roles on tp."""
    return declare(model(), plan, roles(up=Shard(0), norm=Replica("partial"), gate=Replica("complete"), wide=Shard(0)))


def claim(names: Sequence[str], **fields: Any) -> Claim:
    """A claim whose owner nobody calls here."""
    return Claim(
        owner=lambda: pytest.fail("arbitration constructs no owner"),
        parameters=names,
        **{"axes": {"dp_replicate"}, "backend": "mine", **fields},
    )


class Site:
    """A directory of `sys.path` with real distributions: a module, METADATA and entry_points.txt each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self, name: str, source: str = "", *, distribution: str | None = None, version: str = "1.0", module: str | None = None
    ) -> None:
        """Write a plugin called `name`."""
        distribution = distribution or f"mixle-{name}"
        module = module or f"{distribution.replace('-', '_')}_under_test"
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[mixle]\n{name} = {module}\n")
        importlib.invalidate_caches()

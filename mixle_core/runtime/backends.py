"""Backends by their label: the two doors of training under one backend, and the functions that its plugin adds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from mixle_core.errors import CapabilityError, PluginError
from mixle_core.plugins import load_plugins
from mixle_core.runtime.arbitration import explain
from mixle_core.runtime.attaching import attach
from mixle_core.runtime.models import Plugins, loaded_plugins
from mixle_core.runtime.session import prepare

BACKEND_GROUP = "mixle.backends"
"""Entry points of this group are modules; their `__all__` names the functions that the backend of that label has beside its claims."""


@attrs.frozen(eq=False)
class TrainingBackend:
    """Everything under one label: `prepare`, `attach` and `explain` for its claims alone, and the functions of its plugin.

    Args:
        label: what its claims carry.
        functions: name -> function, such as `configure_provider` and `run_pretrain` of a framework with a loop of its own.
    """

    label: str
    functions: Mapping[str, Callable[..., Any]] = attrs.field(factory=dict)

    @property
    def prepare(self) -> Callable[..., Any]:
        """`mixle_core.prepare` under this backend."""
        return partial(prepare, backend=self.label)

    @property
    def attach(self) -> Callable[..., Any]:
        """`mixle_core.attach` under this backend."""
        return partial(attach, backend=self.label)

    @property
    def explain(self) -> Callable[..., Any]:
        """`mixle_core.explain` under this backend."""
        return partial(explain, backend=self.label)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name in ("label", "functions"):
            raise AttributeError(name)
        if name not in self.functions:
            known = ", ".join(("prepare", "attach", "explain", *sorted(self.functions)))
            raise CapabilityError(f"backend {self.label} has no {name}; it has {known}")
        return self.functions[name]


def get_training_backend(label: str, plugins: Plugins = None) -> TrainingBackend:
    """The backend that claims under `label`.

    Args:
        plugins: as in `attach`; None looks at all installed ones.

    Raises:
        CapabilityError: no plugin has this label, with the known ones.
        PluginError: two distributions export functions for it, or what exports them cannot be imported.
    """
    points = [point for point in importlib.metadata.entry_points(group=BACKEND_GROUP) if point.name == label]
    if len({point.value for point in points}) > 1:
        names = " and ".join(f"{p.dist.name} {p.dist.version}" if p.dist else p.value for p in points)
        raise PluginError(f"two distributions export functions for backend {label!r}: {names}; way out: uninstall one of them")
    if points:
        return TrainingBackend(label, _exported(points[0]))
    loaded = loaded_plugins(plugins) if plugins is not None else load_plugins()
    known = {str(plugin.BACKEND) for plugin in loaded.manager.get_plugins() if hasattr(plugin, "BACKEND")}
    if label not in known:
        exported = {point.name for point in importlib.metadata.entry_points(group=BACKEND_GROUP)}
        raise CapabilityError(f"backend {label!r}: expected one of {', '.join(sorted(known | exported)) or 'none: no plugin claims'}")
    return TrainingBackend(label)


def _exported(point: importlib.metadata.EntryPoint) -> dict[str, Callable[..., Any]]:
    try:
        module = point.load()
    except Exception as error:
        raise PluginError(f"backend {point.name!r} ({point.value}) failed to import: {type(error).__name__}: {error}") from error
    return {name: getattr(module, name) for name in getattr(module, "__all__", ())}

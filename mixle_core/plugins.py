"""Finding, loading and asking plugins. Listing imports none of them; load order never decides anything."""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import pluggy
import structlog

from mixle_core import hookspecs
from mixle_core.errors import PluginError, explain_failure

ENTRY_POINT_GROUP = "mixle"
ALLOW_LIST = "MIXLE_PLUGINS"
CORRECT = f"correct the plugin, or leave it out of {ALLOW_LIST}"

log = structlog.get_logger(__name__)


@attrs.frozen
class InstalledPlugin:
    """One entry point of the group `mixle`, as its distribution's metadata says it."""

    name: str
    distribution: str
    version: str
    value: str
    enabled: bool

    def label(self) -> str:
        """Name, distribution and version, for messages."""
        return f"{self.name} ({self.distribution} {self.version})"


def allowed_by_environment() -> frozenset[str] | None:
    """Names in MIXLE_PLUGINS, or None when it is not set. An allow-list is no sandbox: installed code stays importable."""
    listed = os.environ.get(ALLOW_LIST)
    return None if listed is None else frozenset(name.strip() for name in listed.split(",") if name.strip())


def installed_plugins() -> tuple[InstalledPlugin, ...]:
    """Every installed plugin, in name order, without importing any.

    Raises:
        PluginError: when two distributions use one name.
    """
    allowed = allowed_by_environment()
    found: dict[str, InstalledPlugin] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        dist = point.dist
        plugin = InstalledPlugin(
            name=point.name,
            distribution=dist.name if dist else "unknown",
            version=dist.version if dist else "unknown",
            value=point.value,
            enabled=allowed is None or point.name in allowed,
        )
        known = found.setdefault(point.name, plugin)
        if known.distribution != plugin.distribution or known.value != plugin.value:
            raise PluginError(
                f"two distributions register the plugin {point.name!r}: {known.distribution} {known.version} and "
                f"{plugin.distribution} {plugin.version}; way out: uninstall one of them"
            )
    return tuple(found[name] for name in sorted(found))


def require_installed(names: Iterable[str]) -> None:
    """Raise PluginError, with the nearest name, for the first of `names` that is not installed."""
    installed = [plugin.name for plugin in installed_plugins()]
    for name in sorted(set(names) - set(installed)):
        hint = "".join(f" (did you mean {near!r}?)" for near in difflib.get_close_matches(name, installed, n=1))
        raise PluginError(
            f"no plugin named {name!r} is installed{hint}; way out: pip install mixle-{name}, or `mixle plugins` lists what is there"
        )


@attrs.define
class LoadedPlugins:
    """Loaded plugins and the one place that calls their hooks, one plugin at a time and in name order."""

    manager: pluggy.PluginManager
    labels: Mapping[str, str]
    versions: tuple[tuple[str, str], ...]
    broken: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.labels

    def ask(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Call `hook` on every plugin; return (plugin, answer) for the answers that are not None."""
        return [(name, answer) for name in self.labels if (answer := self.ask_one(name, hook, **arguments)) is not None]

    def ask_one(self, name: str, hook: str, **arguments: Any) -> Any:
        """Call `hook` on one plugin; None when it does not implement it."""
        others = [plugin for other, plugin in self.manager.list_name_plugin() if other != name]
        answers = self.manager.subset_hook_caller(hook, remove_plugins=others)(**arguments)
        return answers[0] if answers else None

    def misanswered(self, name: str, hook: str, answer: Any, expected: str) -> PluginError:
        """The error about an answer of a wrong type."""
        return PluginError(f"{self.labels[name]}: {hook} returned {type(answer).__name__}, expected {expected}; way out: {CORRECT}")


def load_plugins(
    names: Iterable[str] | None = None, *, required: Iterable[str] = (), extra: Mapping[str, Any] | None = None
) -> LoadedPlugins:
    """Import plugins and check that they keep the contract of the hooks.

    Args:
        names: the only ones to load, each required; None loads all installed ones that MIXLE_PLUGINS allows.
        required: names that must load even when `names` is None.
        extra: name -> module or object with hookimpls, registered beside the installed ones.

    Raises:
        PluginError: a required plugin that is missing, disabled or fails to import; a hook that does not exist; a
            hookimpl with defaults, wrappers or ordering options.
    """
    extra = dict(extra or {})
    installed = {plugin.name: plugin for plugin in installed_plugins()}
    wanted = list(names) if names is not None else [name for name, plugin in installed.items() if plugin.enabled and name not in extra]
    asked_for = {*required, *(wanted if names is not None else ()), *(allowed_by_environment() or ())} - extra.keys()
    require_installed(asked_for)
    for name in sorted(asked_for):
        if not installed[name].enabled:
            raise PluginError(f"plugin {name!r} is asked for but {ALLOW_LIST} leaves it out; way out: add it to {ALLOW_LIST}")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    loaded: dict[str, tuple[str, str]] = {}
    broken: dict[str, str] = {}
    for name in sorted({*wanted, *required, *extra}):
        label, version = (f"{name} (passed in code)", "in code") if name in extra else (installed[name].label(), installed[name].version)
        try:
            plugin = extra[name] if name in extra else _imported(installed[name])
            _check_contract(label, plugin)
        except PluginError as error:
            if name in asked_for or name in extra:
                raise
            broken[name] = str(error)
            log.warning("plugin_broken", plugin=name, reason=broken[name])
            continue
        if manager.is_registered(plugin):
            twin = loaded[str(manager.get_name(plugin))][0]
            raise PluginError(f"plugins {twin} and {label} are one module; way out: leave one of them out of {ALLOW_LIST}, or uninstall it")
        manager.register(plugin, name=name)
        loaded[name] = (label, version)
    return LoadedPlugins(
        manager=manager,
        labels={name: label for name, (label, _) in loaded.items()},
        versions=tuple((name, version) for name, (_, version) in loaded.items()),
        broken=broken,
    )


def _imported(facts: InstalledPlugin) -> Any:
    try:
        return importlib.metadata.EntryPoint(name=facts.name, value=facts.value, group=ENTRY_POINT_GROUP).load()
    except Exception as error:  # the plugin's code is not ours: whatever its import raises is its failure
        way_out = f"way out: repair it, or leave it out of {ALLOW_LIST}"
        raise PluginError(f"plugin {facts.label()} failed to import: {type(error).__name__}: {error}; {way_out}") from error


def _hookimpls(plugin: Any) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    found = {}
    for name in dir(plugin):
        function = inspect.getattr_static(plugin, name)
        options = getattr(function, f"{hookspecs.PROJECT}_impl", None)
        if options is not None:
            found[name] = (function, options)
    return found


def _check_contract(label: str, plugin: Any) -> None:
    known = {name: inspect.signature(spec) for name, spec in vars(hookspecs).items() if hasattr(spec, f"{hookspecs.PROJECT}_spec")}
    faults = []
    for name, (function, options) in _hookimpls(plugin).items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            faults.append(f"hook {name!r} does not exist; the nearest is {near[0]!r}")
            continue
        ordering = [key for key in ("hookwrapper", "wrapper", "tryfirst", "trylast", "optionalhook", "specname") if options.get(key)]
        if ordering:
            faults.append(f"hook {name!r} uses {', '.join(ordering)}; hooks have no order and no wrappers")
        for argument in inspect.signature(function).parameters.values():
            if argument.name == "self":
                continue
            if argument.name not in known[name].parameters:
                faults.append(f"hook {name!r} takes {argument.name!r}; it may take {', '.join(known[name].parameters)}")
            elif argument.default is not argument.empty:
                faults.append(f"hook {name!r} gives {argument.name!r} a default; take it without one")
    if faults:
        raise PluginError(explain_failure(f"plugin {label} breaks the contract of the hooks", faults, CORRECT))

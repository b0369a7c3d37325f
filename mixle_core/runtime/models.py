"""Plugins as callers name them, models by name, and what a model's own forward says."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from mixle_core.errors import MixleError, UsageError
from mixle_core.plugins import LoadedPlugins, installed_plugins, load_plugins

Plugins = LoadedPlugins | Iterable[str] | Mapping[str, Any] | None
"""Loaded ones; or names to load instead of all installed ones; or name -> module of further ones beside them; None: all installed."""


def loaded_plugins(plugins: Plugins, *, required: Iterable[str] = ()) -> LoadedPlugins:
    """Load what `plugins` says, and `required` beside it.

    Raises:
        PluginError: one that was asked for and cannot be had.
        UsageError: objects without a name.
    """
    if isinstance(plugins, LoadedPlugins):
        return plugins
    if plugins is None or isinstance(plugins, Mapping):
        return load_plugins(None, required=set(required) - set(plugins or ()), extra=plugins)
    names = [plugins] if isinstance(plugins, str) else list(plugins)
    odd = next((item for item in names if not isinstance(item, str)), None)
    if odd is not None:
        raise UsageError(f'plugins names a {type(odd).__name__}; expected names, or name -> module such as {{"mine": {odd!r}}}')
    return load_plugins(names, required=required)


def model_builder(spec: str, plugins: Plugins = None, *, what: str = "model") -> tuple[LoadedPlugins, Callable[[], nn.Module]]:
    """Load the plugins and find what builds a model.

    Args:
        spec: `NAME:REST` of a plugin, else `module:callable` importable from here.
        plugins: as in `attach`; a plugin that `spec` names is loaded beside them.
        what: how the caller's user names `spec`, for messages.

    Raises:
        MixleError: nothing of that name; what is built raises it for what is no module.
    """
    name, colon, rest = spec.partition(":")
    if not colon or not rest:
        raise UsageError(f"{what} {spec!r}: expected NAME:SIZE of a plugin, or module:callable")
    installed = {plugin.name for plugin in installed_plugins()}
    loaded = loaded_plugins(plugins, required=[name] if name in installed else [])
    build = _from_plugin(loaded, name, rest) if name in loaded else _from_callable(name, rest, sorted(installed), what)

    def checked() -> nn.Module:
        model = build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{what} {spec!r} gave {type(model).__name__}; expected a torch.nn.Module")
        return model

    return loaded, checked


def callable_named(spec: str, what: str) -> Callable[..., Any]:
    """What `module:callable` names, importable from here.

    Raises:
        UsageError: nothing of that name, or nothing that can be called.
    """
    module, colon, attribute = spec.partition(":")
    if not colon or not module or not attribute:
        raise UsageError(f"{what} {spec!r}: expected module:callable")
    return _found(module, attribute, [], what)


def _from_plugin(plugins: LoadedPlugins, name: str, rest: str) -> Callable[[], Any]:
    def build() -> Any:
        model = plugins.ask_one(name, "build_model", spec=rest)
        if model is None:
            raise UsageError(f"plugin {name!r} builds no models; name one that does, or module:callable")
        return model

    return build


def _from_callable(module: str, attribute: str, installed: list[str], what: str) -> Callable[[], Any]:
    return _caught(_found(module, attribute, installed, what), f"{what} {module}:{attribute}")


def _found(module: str, attribute: str, installed: list[str], what: str) -> Callable[..., Any]:
    if "" not in sys.path:  # an installed command does not look where it is called; what is found may import more later
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name != module.split(".", maxsplit=1)[0] and error.name != module:
            raise UsageError(f"{what} {module}:{attribute}: importing {module} failed: {error}") from error
        known = ", ".join(installed) or "none"
        raise UsageError(
            f"{what} {module}:{attribute}: {module!r} is neither a plugin (installed: {known}) nor an importable module"
        ) from error
    except AttributeError as error:
        raise UsageError(f"{what} {module}:{attribute}: module {module!r} has no {attribute!r}") from error
    if not callable(found):
        raise UsageError(f"{what} {module}:{attribute}: {type(found).__name__} cannot be called")
    return found  # type: ignore[no-any-return]


def _caught(function: Callable[[], Any], who: str) -> Callable[[], Any]:
    def build() -> Any:
        try:
            return function()
        except MixleError:
            raise
        except Exception as error:  # the user's code: its message is what helps
            raise UsageError(f"{who} raised {type(error).__name__}: {error}") from error

    return build


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """Names that the forward of a model takes, in order, without self and without `*args` and `**kwargs`.

    A wrapper holds its model as `module`, names nothing itself and passes everything on: then they are the model's.
    """
    named = tuple(
        parameter.name
        for parameter in inspect.signature(type(module).forward).parameters.values()
        if parameter.name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    inner = getattr(module, "module", None)
    return forward_names(inner) if not named and isinstance(inner, nn.Module) else named


def vocabulary_size(model: nn.Module) -> int | None:
    """Number of token ids that a model takes: `config.vocab_size` or its own `vocab_size`, else that of its first embedding.

    None when it has none of them.
    """
    size = getattr(getattr(model, "config", None), "vocab_size", getattr(model, "vocab_size", None))
    if size is None:
        size = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
    return None if size is None else int(size)

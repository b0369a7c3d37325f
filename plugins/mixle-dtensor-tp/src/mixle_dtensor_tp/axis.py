"""The executor of the tp axis: cuts parameters and installs the declared boundaries on an unmodified model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mixle_core import Layouts, ModuleLayout, ParameterLayout, Shard, UsageError
from mixle_core.runtime import Mesh, named_modules
from mixle_dtensor_tp.collectives import Convert, conversion

AXIS = "tp"


class TensorParallel:
    """Parameters become plain local slices; each boundary is one collective with its transpose in the backward."""

    def shard(self, layout: ParameterLayout, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """This rank's slice along the declared dim; the parts of a fused matrix are cut one by one."""
        role = layout.roles.get(AXIS)
        if not isinstance(role, Shard):
            return tensor
        number, index = mesh.plan.size(AXIS), mesh.coordinates[AXIS]
        pieces = tensor.split(list(role.parts or (tensor.shape[role.dim],)), role.dim)
        return torch.cat([piece.chunk(number, role.dim)[index] for piece in pieces], role.dim).clone(memory_format=torch.contiguous_format)

    def apply(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        """Hook the modules that declare boundaries."""
        group = mesh.group((AXIS,), "tp.forward")
        assert group is not None
        modules = named_modules(model, layouts.transparent)
        for name, declared in layouts.modules.get(AXIS, {}).items():
            module = modules[name]
            if declared.lookup:
                _install_lookup(module, declared.lookup, mesh)
            if declared.once:
                _install_once(module, declared.once, mesh)
            if declared.sharded_dropout:
                _install_dropout(module, mesh)
            _install_inputs(module, name, declared, group)
            _install_output(module, name, declared, group)


def _install_inputs(module: nn.Module, name: str, declared: ModuleLayout, group: dist.ProcessGroup) -> None:
    if not declared.inputs:
        return
    signature = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    places: list[tuple[int | None, str | None, Convert]] = []
    for key, boundary in declared.inputs.items():
        convert = conversion(boundary.outside, boundary.inside, group, f"input {key!r} of {name}")
        if convert is None:
            continue
        if isinstance(key, int):
            places.append((key, signature[key] if key < len(signature) else None, convert))
        else:
            places.append((signature.index(key) if key in signature else None, key, convert))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        passed = list(args)
        for position, keyword, convert in places:
            if keyword is not None and keyword in kwargs:
                kwargs[keyword] = convert(kwargs[keyword])
            elif position is not None and position < len(passed):
                passed[position] = convert(passed[position])
            else:
                raise UsageError(f"{name} was called without its declared input {keyword if keyword is not None else position!r}")
        return tuple(passed), kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _install_output(module: nn.Module, name: str, declared: ModuleLayout, group: dist.ProcessGroup) -> None:
    if declared.output is None:
        return
    convert = conversion(declared.output.inside, declared.output.outside, group, f"output of {name}")
    if convert is None:
        return

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return convert(output)
        if isinstance(output, (tuple, list)) and isinstance(output[0], torch.Tensor):
            return type(output)([convert(output[0]), *output[1:]])
        raise UsageError(f"{name} returned {type(output).__name__}: its declared output is a tensor, or a tuple that starts with one")

    module.register_forward_hook(after)


def _wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    inner = module.forward
    module.forward = lambda *args, **kwargs: around(inner, *args, **kwargs)


def _install_lookup(module: nn.Module, parameter: str, mesh: Mesh) -> None:
    """Rows of this rank by local index; indices of other ranks give zeros, so that the ranks' outputs add up."""
    rows = module.get_parameter(parameter).shape[0]
    first = rows * mesh.coordinates[AXIS]
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # the row that gets no gradient has a local index too, on the one rank that holds it
        module.padding_idx = padding - first if first <= padding < first + rows else None  # type: ignore[assignment]

    def around(inner: Callable[..., Any], indices: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        local = indices - first
        foreign = (local < 0) | (local >= rows)
        found: torch.Tensor = inner(local.masked_fill(foreign, 0), *args, **kwargs)
        return found.masked_fill(foreign.unsqueeze(-1), 0.0)

    _wrap_forward(module, around)


def _install_once(module: nn.Module, names: tuple[str, ...], mesh: Mesh) -> None:
    """The first rank adds these parameters; the others add zeros that still carry a (zero) gradient."""
    if mesh.coordinates[AXIS] == 0:
        return

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = {name: module._parameters[name] for name in names}
        try:
            for name, value in held.items():
                module._parameters[name] = value * 0.0  # type: ignore[operator,assignment]
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(held)

    _wrap_forward(module, around)


def _install_dropout(module: nn.Module, mesh: Mesh) -> None:
    """Own masks on each rank. The stream is derived from one draw of the shared generator, so that recomputation, which
    restores that generator, draws the same masks again.
    """
    devices = [mesh.device] if mesh.device.type == "cuda" else []

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        drawn = int(torch.randint(2**62, (1,)))
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(drawn + mesh.coordinates[AXIS])
            return inner(*args, **kwargs)

    _wrap_forward(module, around)

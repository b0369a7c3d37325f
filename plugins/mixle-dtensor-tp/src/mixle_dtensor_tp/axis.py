"""The executor of the tp axis: cuts parameters and installs the declared boundaries on an unmodified model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mixle_core import CapabilityError, LayoutError, Layouts, ModuleLayout, ParameterLayout, Shard, Term, UsageError
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
        _refuse_repeated_bias(modules, layouts)
        for name, declared in layouts.modules.get(AXIS, {}).items():
            module = modules[name]
            if declared.lookup:
                _install_lookup(module, name, declared, mesh)
            if declared.once:
                _install_once(module, declared.once, mesh)
            if declared.sharded_dropout:
                _install_dropout(module, mesh)
            _install_inputs(module, name or "the model", declared, group)
            _install_output(module, name or "the model", declared, group)


def _refuse_repeated_bias(modules: dict[str, nn.Module], layouts: Layouts) -> None:
    """Refuse a bias that every rank would add to its own term of a sum, however far out the sum is declared."""
    roles = {name: layout.roles.get(AXIS) for first, layout in layouts.parameters.items() for name in (first, *layout.aliases)}
    once = {f"{module}.{name}".lstrip(".") for module, declared in layouts.modules.get(AXIS, {}).items() for name in declared.once}
    for name, module in modules.items():
        weight, bias = f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")
        if isinstance(module, nn.Linear) and bias in roles and roles[weight] == Shard(1) and bias not in once:
            raise LayoutError(
                f"{bias} on {AXIS}: {weight} is cut along its inputs, so every rank's output is a term of a sum and the bias would be "
                f"added once by every rank; name it in once=(...) of the module whose output is that sum"
            )


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
            said = repr(position if keyword is None else keyword)
            if keyword is not None and keyword in kwargs:
                kwargs[keyword] = convert(_tensor(kwargs[keyword], name, said))
            elif position is not None and position < len(passed):
                passed[position] = convert(_tensor(passed[position], name, said))
            else:
                raise UsageError(f"{name} was called without its declared input {said}")
        return tuple(passed), kwargs

    module.register_forward_pre_hook(before, with_kwargs=True)


def _tensor(value: Any, name: str, said: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{name} was called with a {type(value).__name__} as its declared input {said}; expected a tensor")
    return value


def _install_output(module: nn.Module, name: str, declared: ModuleLayout, group: dist.ProcessGroup) -> None:
    if declared.output is None:
        return
    convert = conversion(declared.output.inside, declared.output.outside, group, f"output of {name}")
    if convert is None:
        return

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return convert(output)
        if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
            items = [convert(output[0]), *output[1:]]
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        raise UsageError(f"{name} returned {type(output).__name__}: its declared output is a tensor, or a tuple that starts with one")

    module.register_forward_hook(after)


def _wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    inner = module.forward

    @functools.wraps(inner)  # inputs are found by the names in the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    module.forward = forward


def _install_lookup(module: nn.Module, name: str, declared: ModuleLayout, mesh: Mesh) -> None:
    """Rows of this rank by local index; indices of other ranks give zeros, so that the ranks' outputs add up."""
    if declared.output is None or not isinstance(declared.output.inside, Term):
        raise LayoutError(f"{name}: lookup={declared.lookup!r} gives zeros for rows of other ranks; its output must be a Term inside")
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(module, option, None):
            raise CapabilityError(f"{name}: {option} counts or changes rows that another rank of {AXIS} holds; build it without {option}")
    assert declared.lookup is not None
    rows = module.get_parameter(declared.lookup).shape[0]
    first, total = rows * mesh.coordinates[AXIS], rows * mesh.plan.size(AXIS)
    (keyword, *_) = inspect.signature(module.forward).parameters
    padding = getattr(module, "padding_idx", None)
    if padding is not None:  # the row that gets no gradient has a local index too, on the one rank that holds it
        module.padding_idx = padding - first if first <= padding < first + rows else None  # type: ignore[assignment]

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        indices = args[0] if args else kwargs.pop(keyword)
        local = indices - first
        inside = (indices >= 0) & (indices < total)  # others stay out of range, and fail as in one process
        foreign = ((local < 0) | (local >= rows)) & inside
        found: torch.Tensor = inner(local.masked_fill(foreign, 0), *args[1:], **kwargs)
        return found.masked_fill(foreign.unsqueeze(-1), 0.0)

    _wrap_forward(module, around)


def _install_once(module: nn.Module, names: tuple[str, ...], mesh: Mesh) -> None:
    """The first rank adds these parameters; the others add zeros that still carry a (zero) gradient."""
    paths = [name.rpartition(".") for name in names]
    holders = [(module.get_submodule(path)._parameters, local) for path, _, local in paths]
    if mesh.coordinates[AXIS] == 0:
        return

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = [parameters[local] for parameters, local in holders]
        try:
            for (parameters, local), value in zip(holders, held, strict=True):
                parameters[local] = value * 0.0  # type: ignore[operator,assignment]
            return inner(*args, **kwargs)
        finally:
            for (parameters, local), value in zip(holders, held, strict=True):
                parameters[local] = value

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

"""From the model a user passes to the one that trains: refused if foreign, filled if on meta, cut, and equal on copies."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mixle_core.errors import CapabilityError, LayoutError, PluginError, UsageError
from mixle_core.layout import Layouts, Replica, is_held, join, logical_name, tied_names
from mixle_core.ownership import pending_axes
from mixle_core.plan import AXES
from mixle_core.runtime._upstream import gradient_hooks
from mixle_core.runtime.groups import CONTROL, Mesh

_BROADCAST_BYTES = 64 * 2**20
_CUT = "_mixle_cut"
_MARK = 0xA5

_Holders = tuple[tuple[str, tuple[int, ...]], ...]
"""Axis and the positions on it that hold a copy."""

Shard = Callable[[str, torch.Tensor], torch.Tensor]
"""Takes a logical name and the whole tensor, returns this rank's slice of it."""

Fill = Callable[[nn.Module, Layouts, int], frozenset[str]]
"""Asks the plugins' `init_params` about the parameters that one module holds directly; returns the names filled."""


def derive_seed(seed: int, *words: object) -> int:
    """A 63-bit seed from the run's seed and some words, the same on every machine."""
    text = "\0".join(map(str, (seed, *words)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def refuse_foreign(model: nn.Module) -> None:
    """Raise CapabilityError when something else already parallelises the model: then two would reduce its gradients."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)):
            found.setdefault(type(module).__mro__[0].__name__, f"module {name or 'at the root'!s}")
        if getattr(module, "sparse", False) is True:
            raise CapabilityError(f"{name} makes sparse gradients, which nobody reduces or clips here; set sparse=False")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found.setdefault("DTensor parameters", name)
        if gradient_hooks(parameter):
            found.setdefault("gradient hooks", name)
    if _CUT in model.__dict__:
        axes = ", ".join(model.__dict__[_CUT])
        raise CapabilityError(f"an earlier attach cut this model over {axes}, and its parameters are slices now; build it anew")
    if found:
        what = ", ".join(f"{kind} ({where})" for kind, where in found.items())
        raise CapabilityError(f"the model already carries {what}; expected a plain module; pass the model before anything wraps it")


def mark_cut(model: nn.Module, axes: tuple[str, ...]) -> None:
    """Remember that executors of `axes` changed the model for good, so that no later attach takes slices for whole parameters."""
    if axes:
        model.__dict__[_CUT] = axes


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the entries of the outermost ModuleLists: the units of a model that declares none."""
    found: list[str] = []
    modules = dict(model.named_modules())  # a module that stands in several places has the first of its names only
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found.extend(block for i in range(len(module)) if (block := join(name, str(i))) in modules)
    return tuple(found)


def with_units(model: nn.Module, layouts: Layouts) -> Layouts:
    """`layouts` with the repeated blocks as units where no plugin named any."""
    if layouts.units:
        return layouts
    return attrs.evolve(layouts, units=tuple(logical_name(name, layouts.transparent) for name in repeated_blocks(model)))


def logical_parameters(model: nn.Module, transparent: tuple[str, ...] = ()) -> dict[str, nn.Parameter]:
    """Logical name -> parameter as the model holds it now, tied ones once, sorted by name."""
    return {name: parameter for name, (parameter, _) in tied_names(model, transparent).items()}


def named_modules(model: nn.Module, transparent: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """Logical module name -> module; where a wrapper shares its name with what it wraps, the inner one."""
    return {logical_name(raw, transparent): module for raw, module in model.named_modules()}


def _holders(model: nn.Module, transparent: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    for raw, module in model.named_modules(remove_duplicate=True):
        if any(True for _ in module.named_parameters(recurse=False)) or any(True for _ in module.named_buffers(recurse=False)):
            yield logical_name(raw, transparent), module


def _own_initialiser(model: nn.Module, module: nn.Module, name: str) -> list[Callable[[], Any]]:
    """The module's own ways to fill itself, the model's convention first."""
    ways: list[Callable[[], Any]] = []
    path = name.split(".") if name else []
    for depth in range(len(path), -1, -1):
        ancestor = model.get_submodule(".".join(path[:depth]))
        rule = getattr(ancestor, "_init_weights", None)
        if callable(rule):
            ways.append(functools.partial(rule, module))
            break
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, method, None)):
            ways.append(getattr(module, method))
            break
    return ways


def _blank(like: torch.Tensor) -> torch.Tensor:
    """On the CPU, with values that no initialiser leaves: NaN, or bytes of `_MARK` where the dtype has none."""
    empty = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    if like.is_floating_point() or like.is_complex():
        return empty.fill_(float("nan"))
    empty.reshape(-1).view(torch.uint8).fill_(_MARK)
    return empty


def _is_blank(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    marked = (tensor.detach().reshape(-1, 1).view(torch.uint8) == _MARK).all(1)
    short = tensor.element_size() == 1 and tensor.dtype != torch.bool  # one byte may well have the value of the mark
    return bool(marked.all() if short else marked.any()) and tensor.numel() > 0


def place_parameters(
    model: nn.Module,
    layouts: Layouts,
    seed: int,
    device: torch.device,
    shard: Shard,
    fill: Fill,
    held: Callable[[str], bool] = lambda name: True,
) -> frozenset[str]:
    """Put every parameter and buffer on `device`, cut; fill those on meta, one module at a time.

    The value of a parameter filled here depends on (seed, logical name) alone: each module is filled whole on the CPU,
    under a generator keyed by its name, and cut afterwards. The global generator is left as it was. Those that are not
    `held` here are left empty.

    Returns:
        Logical names that were filled here; the others came with values.

    Raises:
        LayoutError: a parameter or buffer on meta that nobody fills.
    """
    known = tied_names(model, layouts.transparent)  # keeps the old parameter objects alive: they are told apart by identity
    canonical = {id(parameter): name for name, (parameter, _) in known.items()}
    raw_names = {id(module): raw for raw, module in model.named_modules()}
    placed: dict[int, nn.Parameter] = {}
    filled: set[str] = set()
    for name, module in list(_holders(model, layouts.transparent)):
        parameters = {local: p for local, p in module.named_parameters(recurse=False) if id(p) not in placed}
        # filled whole or not at all: what a parameter draws must not depend on which of its neighbours lie here
        here = any(held(canonical[id(p)]) for p in parameters.values())
        fresh = {local: p for local, p in parameters.items() if p.is_meta and here}
        buffers = {local: b for local, b in module.named_buffers(recurse=False) if b.is_meta}
        if fresh or buffers:
            _fill_module(model, module, raw_names[id(module)], name, fresh, buffers, layouts, seed, fill)
            filled.update(name for p in fresh.values() if held(name := canonical[id(p)]))
        for local, old in parameters.items():
            if held(canonical[id(old)]):
                values = shard(canonical[id(old)], module.get_parameter(local).detach()).to(device)
            else:
                values = torch.empty(0, dtype=old.dtype, device=device)
            if old.is_meta:
                placed[id(old)] = nn.Parameter(values, requires_grad=old.requires_grad)
                module._parameters[local] = placed[id(old)]
            else:
                old.data = values
                placed[id(old)] = old
        for local, buffer in module.named_buffers(recurse=False):
            setattr(module, local, buffer.to(device))
    for _, module in _holders(model, ()):
        for local, parameter in list(module._parameters.items()):
            if id(parameter) in placed:
                module._parameters[local] = placed[id(parameter)]
    return frozenset(filled)


def _fill_module(
    model: nn.Module,
    module: nn.Module,
    raw: str,
    name: str,
    fresh: Mapping[str, nn.Parameter],
    buffers: Mapping[str, torch.Tensor],
    layouts: Layouts,
    seed: int,
    fill: Fill,
) -> None:
    persistent = set(module.state_dict(keep_vars=True)) if buffers else set()
    whole: dict[str, torch.Tensor] = {}
    for local, old in {**fresh, **buffers}.items():
        whole[local] = _blank(old)
    # the module fills whole tensors under its own names; the caller cuts them and puts the final parameters in their place
    stand_ins = {local: nn.Parameter(whole[local], requires_grad=old.requires_grad) for local, old in fresh.items()}
    for local, parameter in stand_ins.items():
        module._parameters[local] = parameter
    for local in buffers:
        module.register_buffer(local, whole[local], persistent=local in persistent)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(derive_seed(seed, name))
        own = {join(name, local) for local in fresh}
        mine = attrs.evolve(layouts, parameters={n: p for n, p in layouts.parameters.items() if n in own})
        done = fill(module, mine, seed) if own else frozenset()
        unset = [local for local in fresh if join(name, local) in done and _is_blank(getattr(module, local))]
        if unset:
            raise PluginError(
                f"init_params said that it filled {', '.join(join(name, local) for local in unset)}, but not all values there are set; "
                "way out: correct the plugin, or let it return only the names it fills"
            )
        pending = [local for local, tensor in whole.items() if join(name, local) not in done and _is_blank(tensor)]
        for way in _own_initialiser(model, module, raw):
            if not pending:
                break
            held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            kept = {local: tensor.clone() for local, tensor in held if local not in pending and not tensor.is_meta}
            way()  # it fills the whole module, not knowing what has its value already
            for local, values in kept.items():
                getattr(module, local).copy_(values)
            pending = [local for local in pending if _is_blank(module.get_buffer(local) if local in buffers else stand_ins[local])]
    if pending:
        raise LayoutError(
            f"{', '.join(join(name, local) for local in pending)} on meta: {type(module).__name__} has no reset_parameters and the model "
            "no _init_weights that fills it; write an init_params hook, or pass the model materialised"
        )


def equalise_copies(model: nn.Module, layouts: Layouts, mesh: Mesh, filled: frozenset[str]) -> None:
    """Broadcast what came with values from the first rank of its replica group; slices and filled parameters stay.

    Args:
        filled: names whose values are equal already, since they depend on the seed and the name alone.
    """
    by_axes: dict[tuple[tuple[str, ...], _Holders], list[torch.Tensor]] = {}
    for name, (parameter, _) in tied_names(model, layouts.transparent).items():
        if name not in filled:
            layout = layouts.parameters[name]
            axes = pending_axes(mesh.plan, layout)
            some = {axis: role.ranks for axis in axes if isinstance(role := layout.roles.get(axis), Replica) and role.ranks is not None}
            by_axes.setdefault((axes, tuple(sorted(some.items()))), []).append(parameter.detach())
    everywhere = tuple(axis for axis in AXES if mesh.plan.size(axis) > 1)
    by_axes.setdefault((everywhere, ()), []).extend(b for b in model.buffers() if b.numel())
    for (axes, holders), tensors in sorted(by_axes.items(), key=lambda item: item[0]):
        group = mesh.group(axes, CONTROL, holders=dict(holders))
        if group is None or not any(tensor.numel() for tensor in tensors):
            continue
        source = dist.get_process_group_ranks(group)[0]
        for batch in _batches(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in batch])
            dist.broadcast(flat.view(torch.uint8), src=source, group=group)  # backends lack some dtypes
            for tensor, values in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
                tensor.copy_(values.view_as(tensor))


def _batches(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if batch and size + tensor.numel() * tensor.element_size() > _BROADCAST_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += tensor.numel() * tensor.element_size()
        yield batch


def recompute_units(model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
    """Recompute each unit in the backward instead of storing its activations.

    Raises:
        CapabilityError: when neither a layout nor the model's structure says what the units are.
    """
    if not layouts.units:
        raise CapabilityError(
            "activation_checkpointing=True, but no layout names units and the model has no ModuleList; declare units in a ModelLayout"
        )
    modules = named_modules(model, layouts.transparent)
    for name in layouts.units:
        if name not in modules:
            if any(f"{n}.".startswith(f"{name}.") and not is_held(p.roles, mesh.position) for n, p in layouts.parameters.items()):
                continue  # of another stage
            raise UsageError(f"unit {name!r} is not a module of the model")
        module = modules[name]
        inner = module.forward

        def forward(*args: Any, _inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return _inner(*args, **kwargs)
            return checkpoint(_inner, *args, use_reentrant=False, **kwargs)

        module.forward = forward

"""The owner: real fully_shard with sum semantics, a shell that can end a window early, and one coalesced sum over tp."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mixle_core import CapabilityError, Gradient, Layouts, OwnerReduction, ParallelPlan, Row
from mixle_core.runtime import Mesh, Observe, Usage, logical_parameters, named_modules, reduce_coalesced, reduce_scatter
from mixle_torch_fsdp2._upstream import drop_accumulated


class _Shell(nn.Module):
    """A root without parameters around the model: its own backward makes every unit reduce what it accumulated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            # the model's own group stays gathered for a backward; none follows, and a step would not reach what is gathered
            assert isinstance(self.module, FSDPModule)
            self.module.reshard()
        return output

    def tick(self, value: torch.Tensor) -> torch.Tensor:
        """A forward that touches no unit; its backward still runs the root's final callback."""
        return value * 1.0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _CountingReduceScatter:
    """fully_shard's reduce-scatter of one unit, with the number of backwards it served, which the ledger reads."""

    def __init__(self, current_backward: Callable[[], int], announce: Callable[[int, int, int], None]) -> None:
        self._current_backward = current_backward
        self._announce = announce
        self.backwards: set[int] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        # a unit that one forward calls several times reduces in as many terms; together they are one reduction
        self.backwards.add(self._current_backward())
        sizes = [tensor.numel() * tensor.element_size() for tensor in (input_tensor, output_tensor)]
        self._announce(self._current_backward(), *sizes)
        return reduce_scatter(output_tensor, input_tensor, group, op, async_op)


class FSDPOwner:
    """Each unit reduces in the last backward; when use varies, all accumulate and the shell's tick reduces at the end.

    The dp-reduced shards of what is also partial on tp are summed over tp in one coalesced call.
    """

    announces = True

    def __init__(self, plan: ParallelPlan, layouts: Layouts) -> None:
        self._plan = plan
        self._layouts = layouts
        self._in_no_sync = False
        self._forwards = 0
        self._last_synced = False
        self._open = False
        self._used: set[str] = set()
        self._left_out: frozenset[str] = frozenset()

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Shard each unit and the rest of `model` over dp_shard; return the shell."""
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        owner = self._owner = rows[0].owner
        self._usage = Usage(self._rows, self._plan)
        device_mesh = mesh.device_mesh([axis for axis in ("dp_replicate", "dp_shard") if self._plan.size(axis) > 1], owner)
        modules = named_modules(model, self._layouts.transparent)
        before = logical_parameters(model, self._layouts.transparent)
        name_of = {id(before[name]): name for name in self._rows}
        holders = {id(p): (module, local) for module in model.modules() for local, p in module.named_parameters(recurse=False)}
        units = [modules[name] for name in reversed(self._layouts.units) if modules[name] is not model]
        self._units: list[tuple[nn.Module, _CountingReduceScatter, list[str]]] = []
        taken: set[int] = set()
        for unit in (*units, model):
            mine = [p for p in unit.parameters() if id(p) in name_of and id(p) not in taken]
            taken.update(map(id, mine))
            names = [name_of[id(p)] for p in mine]
            counting = _CountingReduceScatter(lambda: self._forwards, partial(self._announce, len(self._units), names))
            self._units.append((unit, counting, names))
        places = {name: holders[id(before[name])] for name in self._rows}
        del before, mine  # or every whole parameter would live until the last unit is sharded
        for unit, _, names in self._units:
            # the shell is the root, so what a root does by itself is said to the model's own group: it stays gathered
            reshard = None if unit is not model else False
            fully_shard(unit, mesh=device_mesh, reshard_after_forward=reshard, mp_policy=self._precision(names))
        self._shell = _Shell(model)
        fully_shard(self._shell, mesh=device_mesh)
        register_fsdp_forward_method(self._shell, "tick")
        for module in self._shell.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._shell.set_reduce_scatter_unused_params(True)
        self._parameters = {n: p for n, p in logical_parameters(model, self._layouts.transparent).items() if n in self._rows}
        self._model_axes = sorted({tuple(a for a in row.reduced if a == "tp") for row in rows} - {()})
        self._groups = {reduced: mesh.group(reduced, owner) for reduced in self._model_axes}
        self._direct: set[str] = set()
        self._handles: list[Any] = [self._shell.register_forward_pre_hook(self._before_forward)]
        # fully_shard sets the gradient of a shard itself: autograd reaches one only from a loss over the parameters themselves
        self._handles += [p.register_hook(lambda _, name=name: self._direct.add(name)) for name, p in self._parameters.items()]
        self._handles += [unit.register_forward_pre_hook(partial(self._called, number)) for number, unit in enumerate(units)]
        with torch.no_grad():
            self._shell.tick(torch.zeros(1, device=mesh.device))  # torch takes the module that runs first for the root
        self._gathered: dict[str, torch.Tensor] = {}
        for unit, counting, names in self._units:
            assert isinstance(unit, FSDPModule)
            unit.set_custom_reduce_scatter(counting)  # type: ignore[arg-type]
            self._watch(unit, {name: places[name] for name in names})
        self._set_sync()
        return self._shell

    def _announce(self, number: int, names: list[str], backward: int, before: int, after: int) -> None:
        """One unit's gradients go over dp_shard, and what comes out over dp_replicate; a unit called twice makes two terms of it."""
        names = [name for name in names if name not in self._left_out]
        self._mesh.announce(self._owner, ("dp_shard",), names, before, part_of=(number, backward))
        if self._plan.dp_replicate > 1:
            self._mesh.announce(self._owner, ("dp_replicate",), names, after, part_of=(number, backward))

    def _precision(self, names: list[str]) -> MixedPrecisionPolicy:
        half = any(self._rows[name].dtype != self._rows[name].param_dtype for name in names)
        mixed = self._plan.precision == "bf16"
        return MixedPrecisionPolicy(torch.bfloat16 if mixed else None, torch.float32 if mixed or half else None)

    def _watch(self, unit: FSDPModule, holders: Mapping[str, tuple[nn.Module, str]]) -> None:
        """Gather `unit` once: the gathered parameters live on between gathers, and their gradients tell what was used."""
        unit.unshard()
        for name, (module, local) in holders.items():
            self._gathered[name] = module.get_parameter(local)
            self._handles.append(self._gathered[name].register_post_accumulate_grad_hook(partial(self._note, name)))
        unit.reshard()

    def _note(self, name: str, _: torch.Tensor) -> None:
        self._usage.saw(name)
        self._used.add(name)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._usage.next_forward()
            self._open = True
            self._forwards += 1
            self._last_synced = self._may_overlap and not self._in_no_sync

    def _called(self, number: int, module: nn.Module, args: Any) -> None:
        # collectives pair by order: ranks that call other units of the same size would exchange parameters in silence
        self._mesh.order = zlib.crc32(number.to_bytes(4), self._mesh.order)

    @property
    def _may_overlap(self) -> bool:
        # a single backward accumulates nothing: reducing in it needs no extra memory and is exact whatever is used
        return self._usage.varies is False or self._plan.num_backwards == 1

    def _set_sync(self) -> None:
        self._reduce_in_backward(self._may_overlap and not self._in_no_sync)

    def _reduce_in_backward(self, sync: bool) -> None:
        self._shell.set_requires_gradient_sync(sync)
        self._shell.set_is_last_backward(sync)

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        before, self._in_no_sync = self._in_no_sync, True
        self._set_sync()
        try:
            yield
        finally:
            self._in_no_sync = before
            self._set_sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate whole gradients locally."""
        return self._without_sync()

    def _tick(self, *, sync: bool) -> None:
        self._reduce_in_backward(sync)
        with torch.enable_grad():
            self._shell.tick(torch.zeros(1, device=self._mesh.device, requires_grad=True)).sum().backward()

    def _flush(self, unused: frozenset[str]) -> None:
        """Reduce what was accumulated, the same parameters on every rank: zeros from those that did not use one.

        torch's own zeros have the parameter's dtype and not that of what was accumulated, so here they are made by hand.
        """
        absent = [name for name in self._rows if name not in unused and name not in self._used]
        for name in absent:
            self._gathered[name].grad = torch.zeros_like(self._gathered[name])
        if absent:
            self._tick(sync=False)
        self._forwards += 1
        self._left_out = unused
        self._shell.set_reduce_scatter_unused_params(False)
        self._tick(sync=True)
        self._shell.set_reduce_scatter_unused_params(True)
        self._left_out = frozenset()

    def finish(self, observe: Observe) -> OwnerReduction:
        """Reduce what the last backward did not, and sum over tp what is partial there."""
        unused, missing = self._usage.settle(self._mesh)
        if not self._last_synced or not any(counting.backwards for _, counting, _ in self._units):
            self._flush(unused)
        self._last_synced = self._open = False
        self._used.clear()
        self._set_sync()
        counts: dict[str, int] = {}
        for _, counting, names in self._units:
            number = len(counting.backwards)
            counts.update({name: number for name in names if number and name not in missing and name not in unused})
            counting.backwards.clear()
        for name in self._direct:
            counts[name] = counts.get(name, 0) + 1
        self._direct.clear()
        for name in unused:
            self._parameters[name].grad = None  # no rank used it: what arrived are zeros, and zeros would decay the parameter
        local = {name: self._local(name) for name in self._rows if name not in unused}
        present = {name: gradient for name, gradient in local.items() if gradient is not None}
        observe({name: gradient for name, gradient in present.items() if self._rows[name].model_replica_axes})
        for axes, group in self._groups.items():
            summed = [name for name in present if set(axes) <= set(self._rows[name].reduced)]
            reduce_coalesced([present[name] for name in summed], group, announce=self._mesh.announcer(self._owner, axes, summed))
        return OwnerReduction({name: Gradient(present.get(name), 1.0 / row.copies) for name, row in self._rows.items()}, counts)

    def _local(self, name: str) -> torch.Tensor | None:
        gradient = self._parameters[name].grad
        if gradient is None:
            return None
        if not isinstance(gradient, DTensor):
            raise CapabilityError(f"{name}: expected a sharded gradient from fully_shard, found {type(gradient).__name__}")
        return gradient.to_local()

    def zero(self) -> None:
        """Drop all gradients, also those that an update that is given up has accumulated whole."""
        for parameter in (*self._parameters.values(), *self._gathered.values()):
            parameter.grad = None
        if self._open:
            self._shell.reset_iter_state()
            drop_accumulated(unit for unit, _, _ in self._units)
            self._open = self._last_synced = False
            for _, counting, _ in self._units:
                counting.backwards.clear()
            self._used.clear()
            self._direct.clear()
            self._usage.discard()
            self._set_sync()

    def close(self) -> None:
        """Remove the hooks; parameters stay sharded."""
        for handle in self._handles:
            handle.remove()

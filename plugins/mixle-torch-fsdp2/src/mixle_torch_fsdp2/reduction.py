"""The owner: real fully_shard with sum semantics, a shell that can end a window early, and one coalesced sum over tp."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from mixle_core import CapabilityError, Gradient, Layouts, OwnerReduction, ParallelPlan, Row
from mixle_core.runtime import Mesh, Observe, Usage, logical_parameters, named_modules, reduce_coalesced, reduce_scatter


class _Shell(nn.Module):
    """A root without parameters around the model: its own backward makes every unit reduce what it accumulated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def tick(self, value: torch.Tensor) -> torch.Tensor:
        """A forward that touches no unit; its backward still runs the root's final callback."""
        return value * 1.0

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _CountingReduceScatter:
    """fully_shard's reduce-scatter of one unit, with the count the ledger reads."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return reduce_scatter(output_tensor, input_tensor, group, op, async_op)


class FSDPOwner:
    """Each unit reduces in the last backward; when use varies, all accumulate and the shell's tick reduces at the end.

    The dp-reduced shards of what is also partial on tp are summed over tp in one coalesced call.
    """

    def __init__(self, plan: ParallelPlan, layouts: Layouts) -> None:
        self._plan = plan
        self._layouts = layouts
        self._in_no_sync = False

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Shard each unit and the rest of `model` over dp_shard; return the shell."""
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        owner = rows[0].owner
        self._usage = Usage(self._rows, self._plan)
        self._watched: dict[int, torch.Tensor] = {}
        axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if self._plan.size(axis) > 1)
        options: dict[str, Any] = {"mesh": mesh.device_mesh(axes, owner)}
        if self._plan.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        modules = named_modules(model, self._layouts.transparent)
        before = {id(parameter): name for name, parameter in logical_parameters(model, self._layouts.transparent).items()}
        names_of: dict[str, list[str]] = {}
        units = [modules[name] for name in reversed(self._layouts.units) if modules[name] is not model]
        taken: set[int] = set()
        for unit in (*units, model):
            mine = [p for p in unit.parameters() if id(p) not in taken]
            taken.update(map(id, mine))
            names_of[str(id(unit))] = [before[id(p)] for p in mine if before[id(p)] in self._rows]
        self._handles = [
            module.register_forward_pre_hook(self._watch)
            for module in model.modules()
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        ]
        for unit in units:
            fully_shard(unit, **options)
        # the shell is the root, so what a root does by itself is said to the model's own group: it stays gathered
        fully_shard(model, reshard_after_forward=False, **options)
        self._shell = _Shell(model)
        fully_shard(self._shell, mesh=options["mesh"])
        register_fsdp_forward_method(self._shell, "tick")
        self._units: list[tuple[_CountingReduceScatter, list[str]]] = []
        for unit in (*units, model):
            assert isinstance(unit, FSDPModule)
            counting = _CountingReduceScatter()
            unit.set_custom_reduce_scatter(counting)  # type: ignore[arg-type]
            self._units.append((counting, names_of[str(id(unit))]))
        self._shell.set_reduce_scatter_unused_params(True)
        for module in self._shell.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._parameters = {n: p for n, p in logical_parameters(model, self._layouts.transparent).items() if n in self._rows}
        self._model_axes = sorted({tuple(a for a in row.reduced if a == "tp") for row in rows} - {()})
        self._groups = {reduced: mesh.group(reduced, owner) for reduced in self._model_axes}
        self._shell.register_forward_pre_hook(lambda module, args: self._usage.next_forward() if torch.is_grad_enabled() else None)
        self._names_by_module = {
            id(module): {
                local: next(n for n, q in self._parameters.items() if q is p)
                for local, p in module.named_parameters(recurse=False)
                if any(q is p for q in self._parameters.values())
            }
            for module in model.modules()
        }
        with torch.no_grad():
            self._shell.tick(torch.zeros(1, device=mesh.device))  # torch takes the module that runs first for the root
        self._set_sync()
        return self._shell

    def _watch(self, module: nn.Module, args: Any) -> None:
        """Note the use of gathered parameters: they exist only once a unit was gathered, and live on between gathers."""
        if not torch.is_grad_enabled():
            return
        for local, name in self._names_by_module[id(module)].items():
            parameter = module._parameters[local]
            if parameter is None or isinstance(parameter, DTensor) or id(parameter) in self._watched:
                continue
            self._watched[id(parameter)] = parameter
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._usage.saw(name))

    @property
    def _may_overlap(self) -> bool:
        # a single backward accumulates nothing: reducing in it needs no extra memory and is exact whatever is used
        return self._usage.varies is False or self._plan.num_backwards == 1

    def _set_sync(self) -> None:
        sync = self._may_overlap and not self._in_no_sync
        self._shell.set_requires_gradient_sync(sync)
        self._shell.set_is_last_backward(sync)

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._in_no_sync = True
        self._set_sync()
        try:
            yield
        finally:
            self._in_no_sync = False
            self._set_sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate whole gradients locally."""
        return self._without_sync()

    def finish(self, observe: Observe) -> OwnerReduction:
        """Reduce what the last backward did not, and sum over tp what is partial there."""
        unused, missing = self._usage.settle(self._mesh)
        if not any(counting.calls for counting, _ in self._units):
            self._shell.set_requires_gradient_sync(True)
            self._shell.set_is_last_backward(True)
            with torch.enable_grad():
                self._shell.tick(torch.zeros(1, device=self._mesh.device, requires_grad=True)).sum().backward()
        self._set_sync()
        counts: dict[str, int] = {}
        for counting, names in self._units:
            counts.update({name: counting.calls for name in names if counting.calls and name not in missing and name not in unused})
            counting.calls = 0
        for name in unused:
            self._parameters[name].grad = None  # no rank used it: what arrived are zeros, and zeros would decay the parameter
        local = {name: self._local(name) for name in self._rows if name not in unused}
        present = {name: gradient for name, gradient in local.items() if gradient is not None}
        observe({name: gradient for name, gradient in present.items() if self._rows[name].model_replica_axes})
        for axes, group in self._groups.items():
            reduce_coalesced([g for name, g in present.items() if set(axes) <= set(self._rows[name].reduced)], group)
        return OwnerReduction({name: Gradient(present.get(name), 1.0 / row.copies) for name, row in self._rows.items()}, counts)

    def _local(self, name: str) -> torch.Tensor | None:
        gradient = self._parameters[name].grad
        if gradient is None:
            return None
        if not isinstance(gradient, DTensor):
            raise CapabilityError(f"{name}: expected a sharded gradient from fully_shard, found {type(gradient).__name__}")
        return gradient.to_local()

    def zero(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks; parameters stay sharded."""
        for handle in self._handles:
            handle.remove()

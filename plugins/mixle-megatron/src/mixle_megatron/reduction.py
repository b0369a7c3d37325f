"""The owner: Megatron's gradient buffers and finaliser, checked for what they leave out, and once for each update."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from mixle_core import CapabilityError, Gradient, Layouts, OwnerReduction, ParallelPlan, Row, UsageError
from mixle_core.runtime import Mesh, Observe, Usage, logical_parameters, reduce_coalesced
from mixle_megatron.axis import MegatronAxes, require_megatron
from mixle_megatron.groups import mesh_groups
from mixle_megatron.optimizer import Factory, build


class MegatronOwner:
    """Owns every gradient of a Megatron model: they lie in its DistributedDataParallel's buffers, not in `.grad`.

    What Megatron's finaliser sums is measured once, when installing: it goes by attributes and by names, and leaves out
    norms with another name. What is left out is summed here, before; what is summed without a reason is refused.
    """

    def __init__(self, plan: ParallelPlan, layouts: Layouts) -> None:
        self._plan = plan
        self._layouts = layouts
        self._sharded = plan.dp_shard > 1
        self._has_optimizer = False
        self._updates = 0
        self._holds_reduced = False
        self._unused: frozenset[str] = frozenset()

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Wrap this rank's part in Megatron's DistributedDataParallel, and find out what its finaliser reduces. Collective."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        shell = require_megatron(model)
        if shell.mesh is not mesh:  # no axis splits the model, so no executor built it for this plan
            MegatronAxes().apply(shell, self._layouts, mesh)
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        bound = logical_parameters(shell, self._layouts.transparent)
        self._parameters: dict[str, Any] = {name: bound[name] for name in self._rows}  # with what Megatron notes on parameters
        self._groups = mesh_groups(mesh, "megatron")
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=self._sharded, check_for_nan_in_grad=False
        )
        self._shell = shell
        self._inner = shell.module
        self._ddp: Any = DistributedDataParallel(shell.config, config, shell.module, pg_collection=self._groups)
        shell.module = self._ddp
        self._syncs = _count_syncs(self._ddp)
        self._slices = {name: self._slice(parameter) for name, parameter in self._parameters.items()}
        self._left_out = self._measure()
        shell.owned = {name: (self._parameters[name], self._slices[name]) for name in self._rows}
        # ranks of other stages hold other parameters; all ask about all of them
        elsewhere = frozenset(self._layouts.trainable) - self._rows.keys()
        self._usage = Usage(self._layouts.trainable, self._plan, elsewhere=elsewhere)
        self._handles: list[Any] = [model.register_forward_pre_hook(self._before_forward)]
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._usage.saw(name)))
        return model

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            if self._holds_reduced:
                raise UsageError(
                    "Megatron's buffers still hold the gradients of the last update; call reduction.zero() after the optimizer's step "
                    "(the optimizer's own zero_grad() does not reach them)"
                )
            if self._sharded and self._updates and not self._has_optimizer:
                raise UsageError(
                    "dp_shard above 1 shards the optimizer's state with Megatron's own; make it with reduction.build_optimizer(factory): "
                    "one over the parameters themselves would see no gradient"
                )
            self._usage.next_forward()

    def _slice(self, parameter: nn.Parameter) -> slice | None:
        """Where in the flat parameter this rank's slice of the reduced gradient lies; None for all of it."""
        if not self._sharded:
            return None
        for buffer in (*self._ddp.buffers, *self._ddp.expert_parallel_buffers):
            if parameter not in buffer.param_index_map:
                continue
            start, end, bucket_id = buffer.param_index_map[parameter]
            bucket = buffer.buckets[bucket_id]
            size = bucket.grad_data.numel() // buffer.data_parallel_world_size
            first = bucket.offset + size * buffer.data_parallel_group.rank()
            low, high = max(start, first), min(end, first + size)
            return slice(low - start, max(low, high) - start)
        raise CapabilityError("a parameter is in none of Megatron's gradient buffers")

    def _measure(self) -> list[str]:
        """Let the finaliser reduce ones, and compare with what the table says; return what it leaves to be summed over tp."""
        self._ddp.zero_grad_buffer()
        for parameter in self._parameters.values():
            parameter.main_grad.fill_(1.0)
        self._finalise()
        found = {name: (float(v.min()), float(v.max())) for name in self._rows if (v := self._final(name)).numel()}
        self._ddp.zero_grad_buffer()
        self._syncs.clear()
        # a slice of a small parameter may lie on other data ranks alone: what any of them found holds for all
        everyone = self._mesh.gather_objects(found)
        left_out, wrong = [], []
        for name, row in self._rows.items():
            seen = {value for theirs in everyone for value in theirs.get(name, ())}
            if seen == {float(row.group_size)}:
                continue
            # of experts that tp does not cut, ranks of tp are data ranks; Megatron forgets them where ep is 1
            over_tp = "tp" in row.reduced or ("edp" in row.reduced and self._plan.size("etp") == 1)
            if over_tp and seen == {float(row.group_size) / self._plan.tp}:
                left_out.append(name)
                continue
            wrong.append(f"{name}: Megatron adds up {_numbers(seen)} ranks' gradients, the table says {row.group_size}")
        if wrong:
            raise CapabilityError(
                f"Megatron's finaliser contradicts the declared roles of {len(wrong)} parameters ({'; '.join(wrong[:3])}); it goes by "
                "attributes and by the names q_layernorm and k_layernorm: rename the module, correct the attribute, or change the plan"
            )
        return left_out

    def _finalise(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        # no token count: Megatron divides by that of the last call only, and the session scales once, at the end
        finalize_model_grads([self._ddp], None, pg_collection=self._groups)

    def _final(self, name: str) -> torch.Tensor:
        gradient: torch.Tensor = self._parameters[name].main_grad
        part = self._slices[name]
        return gradient if part is None else gradient.reshape(-1)[part]

    def no_sync(self) -> AbstractContextManager[Any]:
        """Nothing: without overlap, Megatron's buffers are reduced in `finish` alone."""
        context: AbstractContextManager[Any] = self._ddp.no_sync()
        return context

    def finish(self, observe: Observe) -> OwnerReduction:
        """Sum over tp what Megatron leaves out, then let its finaliser reduce the rest."""
        if self._holds_reduced:
            raise UsageError("finish() was called twice on the same gradients; run a backward after zero(), then finish()")
        self._holds_reduced = True
        unused, missing = self._usage.settle(self._mesh)
        self._unused = unused
        present = [name for name in self._rows if name not in unused]
        local = {name: self._parameters[name].main_grad for name in present if self._rows[name].model_replica_axes}
        observe(local)
        left_out = [self._parameters[name].main_grad for name in self._left_out]
        reduce_coalesced(left_out, self._mesh.group(("tp",), "megatron"))
        self._finalise()
        counts = {name: self._syncs.get(self._ddp.param_to_bucket_group[self._parameters[name]], 0) for name in present}
        for name in missing:
            counts.pop(name, None)
        self._syncs.clear()
        self._updates += 1
        gradients = {}
        for name, row in self._rows.items():
            final = None if name in unused else self._final(name)
            gradients[name] = Gradient(final, 1.0 / row.copies)
            if not self._sharded:
                self._parameters[name].grad = final  # for an optimizer over the parameters themselves
        return OwnerReduction(gradients, counts)

    def build_optimizer(self, factory: Factory, names: Iterable[str]) -> torch.optim.Optimizer:
        """Megatron's optimizer around what `factory` makes; its state is sharded over dp_shard.

        Args:
            names: logical names; all that this rank holds when the state is sharded.

        Raises:
            CapabilityError: some of them only; an optimizer that Megatron cannot shard.
        """
        wanted = set(names)
        if self._sharded and wanted != self._rows.keys():
            raise CapabilityError(
                f"an optimizer for {len(wanted)} of {len(self._rows)} parameters: Megatron's distributed optimizer shards all of them "
                "together; use one optimizer for all, or dp_replicate instead of dp_shard"
            )
        expert = {id(parameter) for buffer in self._ddp.expert_parallel_buffers for parameter in buffer.params}
        chosen = [self._parameters[name] for name in self._rows if name in wanted]
        domains = ([p for p in chosen if id(p) not in expert], [p for p in chosen if id(p) in expert])
        self._has_optimizer = True
        return build(factory, domains, self._ddp, self._groups, self._no_gradient, sharded=self._sharded)

    def _no_gradient(self) -> list[nn.Parameter]:
        return [self._parameters[name] for name in self._unused & self._rows.keys()]

    def zero(self) -> None:
        """Drop all gradients, and what an update that is given up has noted."""
        self._holds_reduced = False
        self._ddp.zero_grad_buffer()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._syncs.clear()
        self._usage.discard()

    def close(self) -> None:
        """Remove the hooks and Megatron's wrapper."""
        for handle in self._handles:
            handle.remove()
        self._shell.module = self._inner


def _numbers(seen: set[float]) -> str:
    return " and ".join(f"{value:g}" for value in sorted(seen)) or "no"


def _count_syncs(ddp: Any) -> dict[Any, int]:
    """Bucket group -> how often it was reduced since the dictionary was cleared."""
    counts: dict[Any, int] = {}
    for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups):
        original = group.start_grad_sync

        def counted(*args: Any, _group: Any = group, _original: Any = original, **kwargs: Any) -> Any:
            counts[_group] = counts.get(_group, 0) + 1
            return _original(*args, **kwargs)

        group.start_grad_sync = counted
    return counts

"""The owner: real DistributedDataParallel with an fp32 sum in its hook, and one joint sum for what is also partial on tp."""

# no postponed annotations in this file: DistributedDataParallel compares the hook's annotations with classes
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixle_core import Gradient, OwnerReduction, ParallelPlan, Row, UsageError
from mixle_core.runtime import Mesh, Observe, Usage, logical_parameters, reduce_coalesced
from mixle_torch_ddp._upstream import leave_out, no_buffer_broadcast

_BUCKET_MB = 25


class DDPOwner:
    """Reduces in DistributedDataParallel's buckets while the last backward runs, once every backward is known to use all.

    Until then, and for a window that ends inside `no_sync()`, gradients accumulate locally and are reduced in buckets at
    the end: as many collectives, without the overlap. Parameters that are also partial on tp stay outside the buckets: one
    coalesced sum over the joint group serves them.
    """

    announces = True

    def __init__(self, plan: ParallelPlan, transparent: tuple[str, ...]) -> None:
        self._plan = plan
        self._transparent = transparent
        self._reduced: dict[str, int] = {}
        self._in_no_sync = False
        self._synced_forward = False
        self._seen: set[str] = set()
        self._late: set[str] = set()
        self._armed = False
        self._completing = False

    def install(self, model: nn.Module, rows: tuple[Row, ...], mesh: Mesh) -> nn.Module:
        """Wrap `model`; the wrapper reduces rows over dp_replicate, `finish` the others over dp_replicate x tp."""
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        bound = logical_parameters(model, self._transparent)
        self._parameters = {name: bound[name] for name in self._rows}
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self._parameters.items()}
        self._usage = Usage(self._rows, self._plan)
        owner = self._owner = rows[0].owner
        self._group = mesh.group(("dp_replicate",), owner)
        joint = {row.name: row.reduced for row in rows if set(row.reduced) - {"dp_replicate"}}
        self._joint = {axes: mesh.group(axes, owner) for axes in sorted(set(joint.values()))}
        self._bucketed = [name for name in self._rows if name not in joint]
        self._model = model
        self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in self._parameters.values()]
        self._ddp: DistributedDataParallel | None = None
        self._handles.append(model.register_forward_pre_hook(self._before_forward))
        if not self._bucketed:
            return model
        ours = {self._parameters[name] for name in self._bucketed}
        leave_out(model, [raw for raw, p in model.named_parameters(remove_duplicate=False) if p.requires_grad and p not in ours])
        self._ddp = DistributedDataParallel(
            model,
            process_group=self._group,
            init_sync=False,
            **no_buffer_broadcast(),
            bucket_cap_mb=_BUCKET_MB,
            gradient_as_bucket_view=True,
        )
        self._ddp.register_comm_hook(None, self._hook)
        self._set_sync()
        return self._ddp

    def _set_sync(self) -> None:
        # DistributedDataParallel decides in the forward whether the following backward reduces
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = self._usage.varies is False and not self._in_no_sync

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._armed:
            raise UsageError(
                "a forward whose backward should have reduced was given up, and DistributedDataParallel cannot take that back; "
                "close() and attach a new model, or start the ranks anew"
            )
        if self._reduced:
            raise UsageError(
                "a microbatch follows the one whose backward reduced the gradients; run all but the last inside no_sync(), then finish()"
            )
        self._usage.next_forward()
        self._seen.clear()
        self._synced_forward = self._ddp is not None and self._ddp.require_backward_grad_sync

    def _note(self, parameter: torch.Tensor) -> None:
        if self._completing:
            return
        name = self._names[parameter]
        self._usage.saw(name)
        self._seen.add(name)
        if name in self._reduced:  # its bucket has left: what comes now would stay on this rank
            self._late.add(name)

    def _hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        names = [self._names[parameter] for parameter in bucket.parameters()]
        for name in names:
            self._reduced[name] = self._reduced.get(name, 0) + 1
        values = bucket.buffer()
        half = values.dtype in (torch.float16, torch.bfloat16)
        sent = values.float() if half else values
        self._mesh.announce(self._owner, ("dp_replicate",), names, sent.numel() * sent.element_size())
        future: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(sent, group=self._group, async_op=True).get_future()
        return future.then(lambda done: values.copy_(done.value()[0]) if half else done.value()[0])

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
        """Accumulate locally."""
        return self._without_sync()

    def finish(self, observe: Observe) -> OwnerReduction:
        """Reduce what the last backward did not, and sum jointly over dp_replicate and tp where both are pending."""
        unused, missing = self._usage.settle(self._mesh)
        if self._synced_forward:
            self._complete([self._parameters[name] for name in self._bucketed if name not in self._seen])
        in_buckets, self._reduced = self._reduced, {}
        # a rank whose window ended inside no_sync() sums in another order than its peers' buckets, of the same size all the same
        self._mesh.order = zlib.crc32(b"buckets" if in_buckets else b"at the end", self._mesh.order)
        self._synced_forward = False
        self._set_sync()
        present = [name for name in self._rows if name not in unused]
        for name in present:
            parameter = self._parameters[name]
            if parameter.grad is None:  # used on another rank, or missing: the ledger tells the two apart
                parameter.grad = torch.zeros_like(parameter)
        counts = dict(in_buckets)
        if not in_buckets:
            waiting = [name for name in self._bucketed if name in set(present)]
            said = self._mesh.announcer(self._owner, ("dp_replicate",), waiting)
            reduce_coalesced([self._gradient(n) for n in waiting], self._group, bucket_bytes=_BUCKET_MB * 2**20, announce=said)
            counts = dict.fromkeys(waiting, 1)
        observe({name: self._gradient(name) for name in present if self._rows[name].model_replica_axes})
        for axes, group in self._joint.items():
            names = [name for name in present if self._rows[name].reduced == axes]
            said = self._mesh.announcer(self._owner, axes, names)
            reduce_coalesced([self._gradient(name) for name in names], group, announce=said)
            counts.update({name: counts.get(name, 0) + 1 for name in names})
        for name in missing:
            counts.pop(name, None)
        for name in self._late:
            counts[name] = counts.get(name, 0) + 1
        self._late.clear()
        gradients = {name: Gradient(None if name in unused else self._gradient(name), 1.0 / row.copies) for name, row in self._rows.items()}
        return OwnerReduction(gradients, counts)

    def _complete(self, late: list[torch.Tensor]) -> None:
        """Give the buckets zeros for what the last backward left out: other ranks wait for them, and so does the next forward."""
        if late:
            self._completing = True
            try:
                torch.autograd.backward(late, [torch.zeros_like(parameter) for parameter in late])
            finally:
                self._completing = False

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self._parameters[name].grad
        assert gradient is not None
        return gradient

    def zero(self) -> None:
        """Drop all gradients, and what an update that is given up has noted."""
        for parameter in self._parameters.values():
            parameter.grad = None
        self._armed = self._armed or (self._synced_forward and not self._reduced.keys() >= set(self._bucketed))
        self._synced_forward = False
        self._reduced.clear()
        self._seen.clear()
        self._late.clear()
        self._usage.discard()

    def close(self) -> None:
        """Remove the hooks; the wrapper goes with its last reference."""
        for handle in self._handles:
            handle.remove()
        self._ddp = None

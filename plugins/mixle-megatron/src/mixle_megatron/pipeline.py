"""Megatron's pipeline schedule, driven one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mixle_core import UsageError
from mixle_core.runtime import Mesh


class _EndOfStage(Exception):  # noqa: N818 - no error: it ends a loss function where this stage's part of the model ends
    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class _Stage(nn.Module):
    """What a loss function calls: once for each microbatch; where there are no logits, the call ends this stage's part of the loss."""

    def __init__(self, module: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.__dict__.update(module=module, last=last, called=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__["called"]:  # the other stages have ended theirs, and there is one input for a microbatch
            raise UsageError("the loss called the module twice in one microbatch; across a pipeline it may call it once")
        self.__dict__["called"] = True
        output = self.__dict__["module"](*args, **kwargs)
        if self.__dict__["last"]:
            return output
        raise _EndOfStage(output)


class MegatronPipeline:
    """Runs the stages of one model together.

    Attributes:
        running: whether the schedule is calling the stages; what calls the model otherwise wants its output.
    """

    def __init__(self, groups: Any, mesh: Mesh) -> None:
        self.running = False
        self._groups = groups
        self._mesh = mesh
        self._last = mesh.coordinates["pp"] == mesh.plan.pp - 1

    def run(self, shell: Any, module: nn.Module, microbatches: Sequence[Any], forward: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        """1F1B over `microbatches`; every stage calls the user's loss, which ends early on all but the last one."""
        stage = _Stage(module, last=self._last)

        def step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
            stage.__dict__["called"] = False
            try:
                output = forward(stage, next(iterator))
            except _EndOfStage as end:
                output = end.output
            return output, lambda value: (value, torch.ones((), dtype=torch.int), {})

        self._schedule(shell, step, iter(microbatches), len(microbatches), forward_only=not torch.is_grad_enabled())

    def evaluate(self, shell: Any, arguments: dict[str, Any]) -> torch.Tensor:
        """The last stage's output for one call, on every stage. Collective over the pipeline."""
        found: list[torch.Tensor] = []

        def step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
            output = shell(**arguments)
            found.append(output)
            return output, lambda value: (value.sum(), torch.ones((), dtype=torch.int), {})

        self._schedule(shell, step, iter(()), 1, forward_only=True)
        return self._from_last(found[0] if self._last else None)

    def _from_last(self, value: torch.Tensor | None) -> torch.Tensor:
        group = self._groups.pp
        source = dist.get_process_group_ranks(group)[-1]
        facts: list[Any] = [None if value is None else (tuple(value.shape), value.dtype)]
        dist.broadcast_object_list(facts, src=source, group=group)
        shape, dtype = facts[0]
        shared = torch.empty(shape, dtype=dtype, device=self._mesh.device) if value is None else value.contiguous()
        dist.broadcast(shared, src=source, group=group)
        return shared

    def _schedule(self, shell: Any, step: Any, data: Any, number: int, *, forward_only: bool) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        self.running = True
        try:
            get_forward_backward_func(pp_size=self._mesh.plan.pp, vp_size=None)(
                forward_step_func=step,
                data_iterator=data,
                model=[shell.module],
                num_microbatches=number,
                seq_length=1,  # shapes travel with the activations, so that microbatches may differ
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=P2PCommunicator(self._groups.pp, shell.config),
                pg_collection=self._groups,
            )
        finally:
            self.running = False

"""Megatron's optimizers, stepped with ready gradients, as a torch optimizer that schedules can drive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mixle_core import CapabilityError

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]


class SteppedByMegatron(Optimizer):
    """Megatron's optimizers over one model, as one torch optimizer; what clips, scales and decides is the session.

    Args:
        parts: Megatron's optimizer, and the torch optimizer inside it, of the dense parameters and of the experts.
        unused: the parameters that no rank used in this update: they have no gradient, as in one process.
    """

    def __init__(self, parts: Sequence[tuple[Any, Optimizer]], unused: Callable[[], Iterable[nn.Parameter]]) -> None:
        # not initialised as an optimizer of its own: groups and state are those of the ones inside
        self._parts = parts
        self._unused = unused
        self.defaults = parts[0][1].defaults
        self.stands_for = type(parts[0][1])
        self._wholes = {id(steps): whole for megatron, _ in parts for whole, steps in _pairs(megatron)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizers inside; their parameters are slices where the state is sharded."""
        return [group for megatron, _ in self._parts for group in megatron.optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Parameter -> state, of the optimizers inside."""
        return {key: value for megatron, _ in self._parts for key, value in megatron.optimizer.state.items()}

    def whole(self, stepped: torch.Tensor) -> torch.Tensor:
        """The model's parameter that a tensor of `param_groups` is, or is a slice of."""
        found: torch.Tensor = self._wholes.get(id(stepped), stepped)
        return found

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with the gradients as they are."""
        if closure is not None:
            raise CapabilityError("step(closure): Megatron's optimizers take none; run the backward before step()")
        for megatron, _ in self._parts:
            megatron.prepare_grads()
        self._drop_unused({id(parameter) for parameter in self._unused()})
        for megatron, _ in self._parts:
            if not megatron.step_with_ready_grads():
                raise CapabilityError("Megatron's optimizer refused an update whose gradients are finite; this is not supported")

    def stepped(self, parameter: nn.Parameter) -> tuple[dict[Any, Any], torch.Tensor] | None:
        """The state of the optimizer inside that steps a parameter, and what it steps: the slice here, or the parameter itself."""
        for megatron, _ in self._parts:
            for whole, steps in _pairs(megatron):
                if whole is parameter:
                    return megatron.optimizer.state, steps
        return None

    def _drop_unused(self, unused: set[int]) -> None:
        """Megatron gives every parameter a gradient; one of zeros would be decayed, and moved by its momentum."""
        if not unused:
            return
        for megatron, _ in self._parts:
            for parameter, steps in _pairs(megatron):
                if id(parameter) in unused:
                    steps.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the optimizers inside."""
        for megatron, _ in self._parts:
            megatron.zero_grad(set_to_none)


def _pairs(megatron: Any) -> list[tuple[Any, Any]]:
    """The model's parameters, and what Megatron's optimizer steps of each: a slice where the state is sharded."""
    if hasattr(megatron, "shard_fp32_groups"):
        groups = zip(megatron.model_fp32_groups, megatron.shard_fp32_groups, strict=True)
        return [pair for whole, sliced in groups for pair in zip(whole, sliced, strict=True)]
    return [(parameter, parameter) for group in megatron.optimizer.param_groups for parameter in group["params"]]


def _config(*, sharded: bool) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="adam",  # read where Megatron makes the inner optimizer; here the caller's factory does
        lr=0.0,
        clip_grad=0.0,
        params_dtype=torch.float32,
        use_distributed_optimizer=sharded,
    )


def build(
    factory: Factory,
    domains: Sequence[Sequence[nn.Parameter]],
    ddp: Any,
    groups: Any,
    unused: Callable[[], Iterable[nn.Parameter]],
    *,
    sharded: bool,
) -> Optimizer:
    """Wrap what `factory` makes in Megatron's own optimizer.

    Args:
        domains: the dense parameters and those of experts, which have other data ranks; empty ones are left out.
        ddp: Megatron's DistributedDataParallel.
        groups: its process groups.
        unused: as in SteppedByMegatron.
        sharded: whether optimizer state is sharded over data ranks.

    Raises:
        CapabilityError: an optimizer that Megatron cannot shard.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer

    parts: list[tuple[Any, Optimizer]] = []
    for index, parameters in enumerate(domains):
        if not parameters:
            continue
        inner = factory(list(parameters))
        if not sharded:
            parts.append((FP32Optimizer(inner, _config(sharded=False), None), inner))
            continue
        try:
            megatron = DistributedOptimizer(
                inner,
                _config(sharded=True),
                None,
                None,
                model_chunks=[ddp],
                per_model_buffers={0: ddp.expert_parallel_buffers if index else ddp.buffers},
                data_parallel_group=groups.expt_dp if index else groups.dp_cp,
                data_parallel_group_gloo=None,
                data_parallel_group_idx=0,
                distributed_optimizer_instance_id=0,
            )
        except AssertionError as error:
            raise CapabilityError(
                f"{type(inner).__name__} with dp_shard above 1: Megatron's distributed optimizer refuses it ({error}); "
                "use torch.optim.AdamW, or dp_replicate instead of dp_shard"
            ) from error
        parts.append((megatron, inner))
    return SteppedByMegatron(parts, unused)

"""What this plugin claims: every axis and every gradient of a Megatron-Core model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mixle_core import AxisClaim, Claim, Layouts, ModelLayout, OwnershipTable, ParallelPlan, Refusal, Role, hookimpl

BACKEND = "megatron"


_NOT_OURS = Refusal(
    "backend megatron needs a MegatronModel, whose layers are Megatron-Core's own",
    "build the model with mixle_megatron.MegatronModel(config, provider), or choose backend torch_native",
)


def _is_ours(model: Any) -> bool:
    """Whether `model` is a MegatronModel, without importing Megatron for others."""
    return any(kind.__module__ == "mixle_megatron.model" and kind.__name__ == "MegatronModel" for kind in type(model).__mro__)


@hookimpl
def declare_layout(model: Any, plan: ParallelPlan, declared: Mapping[str, Mapping[str, Role]]) -> tuple[ModelLayout, ...] | None:
    """Declare a MegatronModel on every model axis, from what Megatron notes on its parameters under `plan`."""
    if not _is_ours(model):
        return None
    from mixle_megatron.layout import declared as from_marks
    from mixle_megatron.model import build_whole, configured

    if plan.world_size == 1:
        return None
    whole = build_whole(model.base_config, model.provider, plan)
    return from_marks(whole, configured(model.base_config, plan), plan)


@hookimpl
def own_axis(model: Any, plan: ParallelPlan, layouts: Layouts) -> tuple[AxisClaim | Refusal, ...] | Refusal:
    """Claim pp, tp, ep and etp of a MegatronModel."""
    from mixle_megatron.axis import MegatronAxes

    if not _is_ours(model):
        return _NOT_OURS
    claims: list[AxisClaim | Refusal] = [
        AxisClaim(axis=axis, executor=MegatronAxes, backend=BACKEND) for axis in plan.executed_axes if axis != "cp"
    ]
    if plan.cp > 1:
        claims.append(
            Refusal(
                f"cp={plan.cp}: Megatron-Core runs it in Transformer Engine's attention alone, which needs a GPU, and it is unverified",
                "set cp=1",
            )
        )
    return tuple(claims)


@hookimpl
def own_reduction(model: Any, plan: ParallelPlan, layouts: Layouts) -> Claim | Refusal | None:
    """Claim all trainable parameters of a MegatronModel: its gradients lie in Megatron's buffers, also those that are final."""
    from mixle_megatron.limits import refusals
    from mixle_megatron.reduction import MegatronOwner

    if not _is_ours(model):
        return _NOT_OURS
    declined = next(refusals(model.base_config, plan, layouts), None)
    if declined is not None:
        return declined
    return Claim(
        owner=partial(MegatronOwner, plan, layouts),
        parameters=layouts.trainable,
        axes=frozenset({"pp", "dp_replicate", "dp_shard", "tp", "edp", "ep", "etp"}),
        backend=BACKEND,
        stored=("dp_shard", "edp") if plan.dp_shard > 1 else (),
        final=True,
    )


@hookimpl
def save_state(model: Any, optimizers: Mapping[str, Any], ownership: OwnershipTable) -> tuple[Any, ...] | None:
    """Name the blocks of a MegatronModel's parameters and optimizer state."""
    if not _is_ours(model) or not model.owned:
        return None
    from mixle_megatron.state import save

    return save(model, optimizers, ownership)


@hookimpl
def load_state(model: Any, optimizers: Mapping[str, Any], ownership: OwnershipTable, reader: Any) -> frozenset[str] | None:
    """Fill them, from whatever blocks were saved."""
    if not _is_ours(model) or not model.owned:
        return None
    from mixle_megatron.state import load

    return load(model, optimizers, ownership, reader)

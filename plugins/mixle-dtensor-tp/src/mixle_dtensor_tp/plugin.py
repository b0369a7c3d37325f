"""What this plugin claims: the tp axis, and the gradients of a plan that has no data axis."""

from __future__ import annotations

from functools import partial

from mixle_core import AxisClaim, Claim, Layouts, ParallelPlan, Refusal, hookimpl

BACKEND = "torch_native"


@hookimpl
def own_axis(plan: ParallelPlan, layouts: Layouts) -> AxisClaim | Refusal | None:
    """Claim tp: any layout that declares roles and boundaries can be executed."""
    from mixle_dtensor_tp.axis import TensorParallel

    if plan.tp == 1:
        return None
    if not layouts.modules.get("tp") and any(isinstance_shard(layouts, name) for name in layouts.parameters):
        return Refusal(
            "the layout cuts parameters over tp and declares no boundary, so the model's own backend has to execute it",
            "name that backend, or declare how activations lie in `ModuleLayout.inputs` and `output`",
        )
    return AxisClaim(axis="tp", executor=TensorParallel, backend=BACKEND)


@hookimpl
def own_reduction(plan: ParallelPlan, layouts: Layouts) -> Claim | Refusal | None:
    """Claim the replicas of a plan with tp alone; with a data axis its owner sums over tp too, in the same collectives."""
    from mixle_dtensor_tp.reduction import TensorParallelOwner

    if plan.tp == 1:
        return None
    if plan.data_size > 1 or plan.pp > 1 or plan.ep > 1:
        return Refusal(
            "another axis than tp is pending, and its owner sums over tp too",
            "install and enable torch-ddp (dp_replicate) or torch-fsdp2 (dp_shard)",
        )
    replicas = [name for name in layouts.trainable if not isinstance_shard(layouts, name)]
    return Claim(
        owner=partial(TensorParallelOwner, plan, layouts.transparent),
        parameters=replicas,
        axes=frozenset({"tp"}),
        backend=BACKEND,
    )


def isinstance_shard(layouts: Layouts, name: str) -> bool:
    """Whether tp cuts the parameter, so that its gradient is final."""
    from mixle_core import Shard

    return isinstance(layouts.parameters[name].roles.get("tp"), Shard)

"""What this plugin claims: every gradient of a plan whose only data axis is dp_replicate."""

from __future__ import annotations

from functools import partial

from mixle_core import Claim, Layouts, ParallelPlan, Refusal, hookimpl

BACKEND = "torch_native"


@hookimpl
def own_reduction(plan: ParallelPlan, layouts: Layouts) -> Claim | Refusal | None:
    """Claim all trainable parameters, their sums over tp included; decline other data axes and a pipeline."""
    from mixle_torch_ddp.reduction import DDPOwner

    if plan.dp_shard > 1:
        return Refusal(f"dp_shard={plan.dp_shard} shards parameters", "set dp_shard=1, or install and enable torch-fsdp2")
    if plan.cp > 1 or plan.pp > 1 or plan.ep > 1:
        return Refusal("pp, cp and ep are not reduced by DistributedDataParallel", "set pp, cp and ep to 1, or use a backend that has them")
    if plan.dp_replicate == 1:
        return Refusal("dp_replicate=1 leaves no data axis to reduce over", "set dp_replicate above 1")
    return Claim(
        owner=partial(DDPOwner, plan, layouts.transparent),
        parameters=layouts.trainable,
        axes=frozenset({"dp_replicate", "tp"}),
        backend=BACKEND,
    )

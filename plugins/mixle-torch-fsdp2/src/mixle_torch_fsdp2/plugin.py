"""What this plugin claims: every gradient of a plan with dp_shard above 1."""

from __future__ import annotations

from functools import partial

from mixle_core import Claim, Layouts, ParallelPlan, Refusal, hookimpl

BACKEND = "torch_native"


@hookimpl
def own_reduction(plan: ParallelPlan, layouts: Layouts) -> Claim | Refusal | None:
    """Claim all trainable parameters, their sums over dp_replicate and tp included."""
    from mixle_torch_fsdp2.reduction import FSDPOwner

    if plan.dp_shard == 1:
        return Refusal("dp_shard=1 leaves nothing to shard", "set dp_shard above 1")
    if plan.cp > 1 or plan.pp > 1 or plan.ep > 1:
        return Refusal("pp, cp and ep are not reduced by fully_shard", "set pp, cp and ep to 1, or use a backend that has them")
    return Claim(
        owner=partial(FSDPOwner, plan, layouts),
        parameters=layouts.trainable,
        axes=frozenset({"dp_shard", "dp_replicate", "tp"}),
        stored=("dp_shard",),
        stages=(("dp_shard",), ("dp_replicate",), ("tp",)),
        backend=BACKEND,
    )

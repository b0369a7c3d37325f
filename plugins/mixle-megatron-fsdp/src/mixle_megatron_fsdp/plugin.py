"""What this plugin answers: a refusal for every plan, each with what was measured of megatron-fsdp 0.6.1.

It never bids. A bid on dp_shard would be a second one beside torch-fsdp2, so that a user of both who names no backend had to
choose; and no composition is proved on the only device that megatron-fsdp runs on without changes, a GPU.
"""

from __future__ import annotations

from mixle_core import Layouts, ParallelPlan, Refusal, Replica, Shard, hookimpl

BACKEND = "megatron_fsdp"
"""The label of this plugin's claims, once it has one; asked for by name, the refusals are shown."""

INSTEAD = "enable torch-fsdp2 (backend torch_native)"


@hookimpl
def own_reduction(plan: ParallelPlan, layouts: Layouts) -> Refusal:
    """Decline, with the measured fault that this plan would meet first."""
    if plan.dp_shard == 1:
        return Refusal("dp_shard=1 leaves megatron-fsdp nothing to shard", "enable torch-ddp for dp_replicate, dtensor-tp for tp alone")
    if plan.cp > 1 or plan.pp > 1 or plan.ep > 1:
        return Refusal("megatron-fsdp under pp, cp and ep was never compared with one process", f"set pp, cp and ep to 1 and {INSTEAD}")
    return _with_tp(plan, layouts) or _with_replicas(plan) or _with_accumulation(plan) or _UNVERIFIED


_UNVERIFIED = Refusal(
    "megatron-fsdp runs on CUDA only (its constructor calls torch.cuda.current_device whatever device it is given), where it has "
    "not been compared with one process; on CPU, with the names of torch.cuda redirected, small fp32 models were exact",
    f"{INSTEAD}; to establish what is missing, run verify_on_gpu.py from the source of mixle-megatron-fsdp",
)


def _with_tp(plan: ParallelPlan, layouts: Layouts) -> Refusal | None:
    """The first parameter whose role on tp megatron-fsdp gets wrong."""
    if plan.tp == 1:
        return None
    roles = {name: layout.roles.get("tp") for name, layout in layouts.parameters.items() if layout.trainable}
    for name, role in roles.items():
        if isinstance(role, Replica) and role.gradient == "partial":
            return Refusal(
                f"the gradient of {name} is partial on tp, and megatron-fsdp copies this rank's term of it into its buffer without the "
                "sum over tp: with dp_shard=2 x tp=2, such gradients were 0.44 to 0.52 off and the copies on tp differed",
                INSTEAD,
            )
    for name, role in roles.items():
        if isinstance(role, Shard):
            return Refusal(
                f"{name} is a slice on tp: megatron-fsdp overwrites plain slices with those of the first tp rank, and fails to wrap a "
                "DTensor that is cut along another dimension than 0, on some ranks while the others wait",
                INSTEAD,
            )
    return None


def _with_replicas(plan: ParallelPlan) -> Refusal | None:
    if plan.dp_replicate == 1 or plan.num_backwards == 1:
        return None
    return Refusal(
        f"with dp_replicate={plan.dp_replicate} and {plan.num_backwards} backwards in an update, megatron-fsdp's default "
        "(sync_model_each_microbatch=True) sums over dp_replicate what it has summed before, inside no_sync() too: gradients were "
        "2.5 off after three backwards",
        INSTEAD,
    )


def _with_accumulation(plan: ParallelPlan) -> Refusal | None:
    if plan.num_backwards == 1:
        return None
    return Refusal(
        f"megatron-fsdp reduces every bucket in each of the {plan.num_backwards} backwards of an update, and no_sync() changes nothing: "
        "9 reductions in place of 3 with three backwards. The sums were right; the calls grow with the accumulation",
        INSTEAD,
    )

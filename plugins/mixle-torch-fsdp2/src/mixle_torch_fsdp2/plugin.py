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
    return _unfit(layouts) or Claim(
        owner=partial(FSDPOwner, plan, layouts),
        parameters=layouts.trainable,
        axes=frozenset({"dp_shard", "dp_replicate", "tp"}),
        stored=("dp_shard",),
        stages=(("dp_shard",), ("dp_replicate",), ("tp",)),
        backend=BACKEND,
    )


def _unfit(layouts: Layouts) -> Refusal | None:
    """The first parameter that fully_shard does not take: it would say so only when the processes already run."""
    dtype_of: dict[str, tuple[str, str]] = {}
    for layout in layouts.parameters.values():
        units = {name: _unit(name, layouts) for name in (layout.name, *layout.aliases)}
        unit = units[layout.name]
        apart = [name for name in layout.aliases if units[name] != unit]
        if apart:
            where = f"{unit or 'the root'} and {units[apart[0]] or 'the root'}"
            return Refusal(
                f"{layout.name} and {apart[0]} are one tied parameter in two units ({where}), and fully_shard gathers a parameter in one",
                "untie them, declare units in a layout that keep both in one unit or outside of all, or set dp_shard=1",
            )
        if not layout.shape:
            return Refusal(f"{layout.name} has no dimension to shard", "give it the shape [1], or set dp_shard=1")
        if layout.trainable:
            first, dtype = dtype_of.setdefault(unit, (layout.name, layout.dtype))
            if dtype != layout.dtype:
                return Refusal(
                    f"{first} is {dtype} and {layout.name} is {layout.dtype} in one unit ({unit or 'the root'}), and fully_shard reduces "
                    "the trainable parameters of a unit in one dtype",
                    "give them one dtype, freeze one of them, or set dp_shard=1",
                )
    return None


def _unit(name: str, layouts: Layouts) -> str:
    """The innermost unit that holds a parameter; empty for the root."""
    inside = [unit for unit in layouts.units if name.startswith(f"{unit}.")]
    return max(inside, key=len, default="")

"""The hooks a plugin may implement: signatures and docstrings only.

All plugins are asked. `None` means "not mine", never "done". Answers are frozen values keyed by logical names. A hookimpl
names only the arguments it needs, without defaults, wrappers or ordering options. Every hook is called on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from mixle_core.layout import Layouts, ModelLayout, Role
    from mixle_core.ownership import AxisClaim, Claim, OwnershipTable, Refusal
    from mixle_core.plan import ParallelPlan
    from mixle_core.runtime.state import StateEntry, StateReader

PROJECT = "mixle"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def declare_layout(
    model: Any, plan: ParallelPlan, declared: Mapping[str, Mapping[str, Role]]
) -> ModelLayout | tuple[ModelLayout, ...] | None:
    """Declare what the parameters of a model are on a model axis, and which modules to wrap as one.

    Called before anything is sharded, and may not communicate; a plugin that answered is not asked again, one that
    answered None is asked again after every round that declared something.

    Args:
        model: the module, whole, materialised or on meta; global shapes. Do not change it.
        plan: the parallel plan.
        declared: logical name -> axis -> role, from earlier rounds. An adapter plugin waits here for its base layer.

    Returns:
        One layout per axis, or None when the model is not this plugin's.

    Raises:
        CapabilityError: when the model cannot be split as the plan says, naming the reason and the way out.

    Example: `return ModelLayout(axis="tp", modules={"*.up": ModuleLayout(parameters={"weight": Shard(0)})})`
    """


@hookspec
def own_axis(model: Any, plan: ParallelPlan, layouts: Layouts) -> AxisClaim | tuple[AxisClaim, ...] | Refusal | None:
    """Bid to execute one model axis: to shard the weights and install the boundaries that the layouts declare.

    Called once, before `own_reduction`, when an axis that splits the forward (a model axis or cp) is above 1. Axes claimed
    with one factory are executed by one object.

    Args:
        model: as in `declare_layout`, for a plugin that executes models of one kind only.
        plan: the parallel plan.
        layouts: everything declared, by logical name.

    Returns:
        AxisClaim, a tuple of them, Refusal(reason, remedy) when this plan is what stands in the way, or None.

    Example: `return AxisClaim(axis="tp", executor=TensorParallel, backend="torch_native") if plan.tp > 1 else None`
    """


@hookspec
def own_reduction(model: Any, plan: ParallelPlan, layouts: Layouts) -> Claim | tuple[Claim, ...] | Refusal | None:
    """Bid to reduce the gradients of named parameters over all their pending axes.

    Called once. The core constructs the owners that win, and only those.

    Args:
        model: as in `declare_layout`, for a plugin that owns the gradients of models of one kind only.
        plan: the parallel plan.
        layouts: everything declared, by logical name.

    Returns:
        Claim, several of them, Refusal(reason, remedy), or None.

    Example: `return Claim(owner=partial(MyOwner, plan), parameters=layouts.trainable, axes={"dp_replicate"}, backend="mine")`
    """


@hookspec
def init_params(model: Any, layouts: Layouts, seed: int) -> frozenset[str] | None:
    """Fill parameters of a model that was built on meta; those nobody fills are initialised by the model's own code.

    Called for each module that holds parameters on meta, before they are cut. A value may depend on (seed, logical name) alone.

    Args:
        model: the module that holds the parameters, not the whole model; they are whole (global shapes), on the CPU.
        layouts: everything declared; its `parameters` are those to fill here, under their names in the whole model.
        seed: of the run; torch's global generator is seeded from it and the module's name meanwhile.

    Returns:
        Logical names that were filled, or None.

    Example: `model.scale.data.fill_(1.0); return frozenset(layouts.parameters)`
    """


@hookspec
def save_state(model: Any, optimizers: Mapping[str, Any], ownership: OwnershipTable) -> tuple[StateEntry, ...] | None:
    """Name what this rank holds of parameters and optimizer state that lie where only this plugin finds them.

    Called when state is saved, after an update. Two plugins that name one parameter are an error.

    Args:
        model: the attached model, as it lies on this rank.
        optimizers: pattern -> optimizer, of the session or of an own loop.
        ownership: the table.

    Returns:
        Blocks by logical name, kind and global offset, or None.

    Example: `return tuple(StateEntry(name, "parameter", row.shape, offset, tensor) for ...)`
    """


@hookspec
def load_state(model: Any, optimizers: Mapping[str, Any], ownership: OwnershipTable, reader: StateReader) -> frozenset[str] | None:
    """Fill from `reader` what `save_state` would name, under whatever plan it was saved. Called when state is loaded.

    Args:
        model: the attached model.
        optimizers: pattern -> optimizer.
        ownership: the table.
        reader: gives any block of any tensor.

    Returns:
        Logical names that were filled, or None.

    Example: `parameter.copy_(reader.read(name, "parameter", offset, shape)); return frozenset({name})`
    """


@hookspec
def build_model(spec: str) -> Any:
    """Build the model that a name such as `mymodel:tiny` stands for, on meta where weights need not be read.

    Asked only of the plugin named before the colon, on every rank, and several times: a new module, equal on every call.

    Args:
        spec: what stands after the colon.

    Returns:
        The module.

    Raises:
        UsageError: an unknown spec, with the known ones.

    Example: `return MyModel(SIZES[spec])`
    """

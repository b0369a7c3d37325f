"""The parallel plan: how many ranks each mesh axis has, and how an update is cut into microbatches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from mixle_core.errors import PlanError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes that multiply to the world size, slowest varying first: ranks of one tp group are neighbours."""

EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""The same ranks as an expert sees them, slowest varying first."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp", "edp")
"""Axes whose ranks see different tokens: every gradient is a term of a sum over them, without a declaration."""

MODEL_AXES = ("pp", "tp", "ep", "etp")
"""Axes on which a layout declares what a parameter is."""

PRECISIONS = ("fp32", "bf16")


def mesh_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The view of the mesh that has all of `axes`: `AXES`, or `EXPERT_AXES`."""
    wanted = set(axes)
    for view in (AXES, EXPERT_AXES):
        if wanted <= set(view):
            return view
    odd = sorted(wanted - set(AXES) - set(EXPERT_AXES)) or sorted(wanted - set(AXES))
    raise PlanError(f"axis {', '.join(odd)}: expected some of {', '.join(AXES)}; or, of experts, of {', '.join(EXPERT_AXES)}")


def _positive(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{field.name}={value!r}: expected an integer of at least 1")


def _size() -> Any:
    return attrs.field(default=1, validator=_positive)


@attrs.frozen(kw_only=True)
class ParallelPlan:
    """Sizes of the mesh axes and of one update.

    One `train_batch` is cut into `microbatches` backwards; `gradient_accumulation_steps` of them make an update.
    `ep` and `etp` are cut out of the data-parallel domain and do not multiply the world size; `etp=None` means `tp`.

    Args:
        sequence_parallel: keep activations between blocks sharded along the sequence over `tp`.
        activation_checkpointing: recompute the units that the layout names instead of storing their activations.
        precision: "fp32", or "bf16" (fp32 master parameters, bf16 compute, fp32 accumulation and reduction).
        unused_parameters: True when a parameter may go unused in some updates; False when every parameter is used in
            every last backward; None lets the first update decide.
        timeout_s: seconds after which a collective that a rank never joins fails, for every process group.

    Raises:
        PlanError: for sizes that cannot be true.
    """

    pp: int = _size()
    dp_replicate: int = _size()
    dp_shard: int = _size()
    cp: int = _size()
    tp: int = _size()
    ep: int = _size()
    etp: int | None = attrs.field(default=None, validator=attrs.validators.optional(_positive))
    sequence_parallel: bool = False
    microbatches: int = _size()
    gradient_accumulation_steps: int = _size()
    activation_checkpointing: bool = False
    precision: str = "fp32"
    unused_parameters: bool | None = None
    timeout_s: float = 600.0

    def __attrs_post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision={self.precision!r}: expected one of {', '.join(PRECISIONS)}")
        if not self.timeout_s > 0:
            raise PlanError(f"timeout_s={self.timeout_s!r}: expected a number of seconds above 0")
        if self.sequence_parallel and self.tp == 1:
            raise PlanError("sequence_parallel=True with tp=1: it shards activations over tp; set tp above 1 or leave it out")
        domain = self.data_size * self.tp
        if domain % (self.ep * self.size("etp")):
            raise PlanError(
                f"ep={self.ep} times etp={self.size('etp')} does not divide the {domain} ranks of data and tp together; "
                "choose ep and etp that do"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def data_size(self) -> int:
        """Number of ranks that see different tokens."""
        return math.prod(self.size(axis) for axis in ("dp_replicate", "dp_shard", "cp"))

    @property
    def num_backwards(self) -> int:
        """Backwards in one full update."""
        return self.microbatches * self.gradient_accumulation_steps

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`, the folded expert axes included."""
        if axis == "edp":
            return self.data_size * self.tp // (self.ep * self.size("etp"))
        if axis == "etp":
            return self.tp if self.etp is None else self.etp
        if axis not in (*AXES, "ep"):
            raise PlanError(f"axis {axis!r}: expected one of {', '.join((*AXES, 'edp', 'ep', 'etp'))}")
        return int(getattr(self, axis))

    @property
    def active(self) -> tuple[str, ...]:
        """Axes of size above 1, in mesh order; expert axes only when ep or etp is set apart from tp."""
        expert = [axis for axis in ("ep",) if self.ep > 1]
        if self.etp is not None and self.etp != self.tp:
            expert.append("etp")
        return (*(axis for axis in AXES if self.size(axis) > 1), *expert)

    @property
    def executed_axes(self) -> tuple[str, ...]:
        """Active axes on which the forward itself is split, so that a plugin must execute them."""
        return tuple(axis for axis in self.active if axis in (*MODEL_AXES, "cp"))

    def coordinates(self, rank: int, axes: Sequence[str] = AXES) -> dict[str, int]:
        """Position of `rank` on each of `axes`, which is `AXES` or `EXPERT_AXES`."""
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank}: expected 0 to {self.world_size - 1} for this plan")
        position: dict[str, int] = {}
        for axis in reversed(axes):
            rank, position[axis] = divmod(rank, self.size(axis))
        return {axis: position[axis] for axis in axes}

    def rank_of(self, position: Mapping[str, int]) -> int:
        """Inverse of `coordinates`."""
        rank = 0
        for axis in mesh_axes(position):
            rank = rank * self.size(axis) + position[axis]
        return rank

    def group_ranks(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks that share every coordinate with `rank` except those on `axes`, in mesh order."""
        view = mesh_axes(axes := set(axes))
        positions = [self.coordinates(rank, view)]
        for axis in (axis for axis in view if axis in axes):
            positions = [{**position, axis: i} for position in positions for i in range(self.size(axis))]
        return tuple(self.rank_of(position) for position in positions)

    def as_dict(self) -> dict[str, Any]:
        """Fields and values, ready for JSON."""
        return attrs.asdict(self)

    def describe(self) -> str:
        """The axes above 1 in one phrase, such as `dp_shard=2 x tp=2`."""
        return " x ".join(f"{axis}={self.size(axis)}" for axis in self.active) or "one process"

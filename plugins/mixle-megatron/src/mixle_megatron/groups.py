"""Megatron's process groups, taken from the mesh: one collection for each owner of traffic."""

from __future__ import annotations

from typing import Any

from mixle_core.runtime import Mesh, solo_group
from mixle_megatron._upstream import Alone

AXES_OF = {
    "tp": ("tp",),
    "pp": ("pp",),
    "mp": ("pp", "tp"),
    "cp": ("cp",),
    "tp_cp": ("cp", "tp"),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "tp_dp_cp": ("dp_replicate", "dp_shard", "cp", "tp"),
    "ep": ("ep",),
    "expt_tp": ("etp",),
    "tp_ep": ("ep", "etp"),
    "tp_ep_pp": ("pp", "ep", "etp"),
    "expt_dp": ("edp",),
    "intra_dist_opt": ("pp", "dp_replicate", "dp_shard", "cp", "tp"),
}
"""Field of Megatron's ProcessGroupCollection -> the axes of the plan whose ranks are in it."""


def _empty() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    groups.embd = groups.pos_embd = groups.hcp = groups.inter_dist_opt = None
    return groups


def _with_aliases(groups: Any) -> Any:
    groups.intra_dp_cp, groups.intra_expt_dp = groups.dp_cp, groups.expt_dp
    return groups


def lone_groups() -> Any:
    """Groups of one process, before any process group exists."""
    groups = _empty()
    for field in AXES_OF:
        setattr(groups, field, Alone())
    return _with_aliases(groups)


def mesh_groups(mesh: Mesh, owner: str) -> Any:
    """Groups of this rank in `mesh`, made by its factory for `owner`. Collective."""
    groups = _empty()
    for field, axes in AXES_OF.items():
        setattr(groups, field, mesh.group(axes, owner, alone=True))
    if mesh.plan.pp > 1:
        groups.embd = mesh.group(("pp",), owner, holders={"pp": (0, mesh.plan.pp - 1)})
        groups.pos_embd = mesh.group(("pp",), owner, holders={"pp": (0,)}, alone=True)
    return _with_aliases(groups)


def solo_groups(owner: str) -> Any:
    """Real groups of this rank alone, for a whole model that runs by itself."""
    groups = _empty()
    alone = solo_group(owner)
    for field in AXES_OF:
        setattr(groups, field, alone)
    return _with_aliases(groups)

"""The plan numbers ranks as Megatron-Core does: every group of every plan, and those that Megatron itself makes."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixle_megatron._upstream import _RANKS, _STATE
from mixle_megatron.groups import AXES_OF, mesh_groups

import mixle_core as mx
from mixle_core.errors import PlanError
from mixle_core.plan import AXES, EXPERT_AXES
from mixle_core.runtime import Mesh
from mixle_core.testing import run_ranks

Plan = mx.ParallelPlan

LIMIT = 64
ORDER = "tp-cp-ep-dp-pp"
DECODER = {
    "tp": "tp",
    "pp": "pp",
    "mp": "tp-pp",
    "cp": "cp",
    "tp_cp": "tp-cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "tp_dp_cp": "tp-dp-cp",
    "intra_dist_opt": "tp-cp-dp-pp",
}
EXPERT = {"ep": "ep", "expt_tp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "expt_dp": "dp"}
"""Field -> the token that `initialize_model_parallel` asks the generator of the decoder, or of the experts, for."""


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@functools.cache
def plans() -> tuple[mx.ParallelPlan, ...]:
    """Every plan with at most 64 ranks, each with every ep and etp that it takes."""
    sizes = [[]]
    for _ in AXES:
        sizes = [[*known, more] for known in sizes for more in range(1, LIMIT // torch.Size(known).numel() + 1)]
    found = []
    for values in sizes:
        dense = Plan(**dict(zip(AXES, values, strict=True)), etp=1)
        domain = dense.data_size * dense.tp
        found += [Plan(**dict(zip(AXES, values, strict=True)), ep=ep, etp=etp) for ep in divisors(domain) for etp in divisors(domain // ep)]
    return tuple(found)


@functools.cache
def megatrons(token: str, tp: int, ep: int, dp: int, pp: int, cp: int) -> frozenset[tuple[int, ...]]:
    """The groups that Megatron's generator makes for `token`."""
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=cp, order=ORDER)
    return frozenset(map(tuple, generator.get_ranks(token)))


def views(plan: mx.ParallelPlan) -> list[tuple[tuple[str, ...], dict[str, str], tuple[int, ...]]]:
    """(axes, fields, sizes tp, ep, dp, pp, cp of Megatron's generator): of the decoder, and of the experts."""
    data = plan.dp_replicate * plan.dp_shard
    dense, folded = (plan.tp, 1, data, plan.pp, plan.cp), (plan.size("etp"), plan.ep, plan.size("edp"), plan.pp, 1)
    return [(AXES, DECODER, dense), (EXPERT_AXES, EXPERT, folded)]


def once(done: set[Any], plan: mx.ParallelPlan, view: tuple[str, ...]) -> bool:
    """Whether no plan before had these sizes in this view: groups and coordinates depend on nothing else."""
    key = (view, *map(plan.size, view))
    return key not in done and not done.add(key)


def partition(plan: mx.ParallelPlan, axes: tuple[str, ...]) -> frozenset[tuple[int, ...]]:
    """All groups over `axes`, each asked for by its first rank; every rank is in one."""
    if all(plan.size(axis) == 1 for axis in axes):  # of the many groups of one rank, the first and the last are asked for
        assert [plan.group_ranks(rank, axes) for rank in (0, plan.world_size - 1)] == [(0,), (plan.world_size - 1,)]
        return frozenset((rank,) for rank in range(plan.world_size))
    seen: set[int] = set()
    groups = []
    for rank in range(plan.world_size):
        if rank not in seen:
            groups.append(plan.group_ranks(rank, axes))
            seen.update(groups[-1])
    assert sorted(itertools.chain(*groups)) == list(range(plan.world_size))
    return frozenset(groups)


@functools.cache
def places(token: str, *sizes: int) -> list[int]:
    """Where each rank stands in its group."""
    place = {rank: index for ranks in megatrons(token, *sizes) for index, rank in enumerate(ranks)}
    return [place[rank] for rank in range(len(place))]


def test_every_field_is_compared():
    assert DECODER.keys() | EXPERT.keys() == AXES_OF.keys()


def test_the_groups_of_every_plan_are_those_of_megatrons_generator():
    done: set[Any] = set()
    for plan in plans():
        for view, fields, sizes in views(plan):
            if once(done, plan, view):
                for field, token in fields.items():
                    assert partition(plan, AXES_OF[field]) == megatrons(token, *sizes), (field, plan)
    assert len(plans()) > 60_000 and len(done) > 5_000


def test_every_rank_of_every_plan_has_megatrons_coordinates():
    """A coordinate is the rank's place in Megatron's group; the data coordinate counts dp_shard within dp_replicate."""
    done: set[Any] = set()
    for plan in plans():
        for view, _, sizes in views(plan):
            if not once(done, plan, view):
                continue
            dense = view == AXES
            tokens = {"pp": "pp", "cp": "cp", "tp": "tp", "data": "dp"} if dense else {"pp": "pp", "edp": "dp", "ep": "ep", "etp": "tp"}
            theirs = {axis: places(token, *sizes) for axis, token in tokens.items()}
            for rank in range(plan.world_size):
                at = plan.coordinates(rank, view)
                if dense:
                    at["data"] = at.pop("dp_replicate") * plan.dp_shard + at.pop("dp_shard")
                assert at == {axis: place[rank] for axis, place in theirs.items()}, (plan, rank)


def test_every_member_of_a_group_asks_for_the_same_group():
    for plan in plans():
        if plan.world_size <= 6:
            for axes in AXES_OF.values():
                for rank in range(plan.world_size):
                    ranks = plan.group_ranks(rank, axes)
                    assert rank in ranks and all(plan.group_ranks(other, axes) == ranks for other in ranks), (plan.describe(), axes)


def test_what_the_plan_refuses_megatron_refuses_as_well():
    """An ep times etp that does not divide the ranks of data and tp."""
    from megatron.core import parallel_state

    with pytest.raises(PlanError, match=r"ep=3 times etp=1 does not divide the 8 ranks"):
        Plan(dp_shard=4, tp=2, ep=3, etp=1)
    (outcome,) = run_ranks(refused_by_megatron, 1)
    assert "is not divisible by expert_tensor_model_pipeline_parallel size (3)" in outcome.value
    assert parallel_state._TENSOR_MODEL_PARALLEL_GROUP is None


def refused_by_megatron() -> str:
    from megatron.core import parallel_state

    start_fake(0, 8)
    with pytest.raises(RuntimeError) as refused:
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=3, expert_tensor_parallel_size=1)
    return str(refused.value)


def start_fake(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


MADE = {
    "pp2xdp2xtp2": Plan(pp=2, dp_shard=2, tp=2, ep=2, etp=1),
    "pp4xtp2": Plan(pp=4, tp=2),
    "ep4": Plan(dp_replicate=2, tp=4, ep=4, etp=1),
    "ep2xetp2": Plan(dp_replicate=4, tp=2, ep=2, etp=2),
    "pp3xdp4xtp2": Plan(pp=3, dp_replicate=2, dp_shard=2, tp=2, ep=2, etp=2),
    "etp above tp": Plan(dp_replicate=4, tp=1, etp=2),
    "cp2": Plan(pp=2, dp_shard=2, cp=2, tp=2, ep=2, etp=1),
}


def made_by_megatron(plan: mx.ParallelPlan, ranks: list[int]) -> list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """(rank, ranks of Megatron's groups by field, of mixle's groups by field, and of Megatron's globals by name)."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    found = []
    for rank in ranks:
        start_fake(rank, plan.world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=plan.tp,
            pipeline_model_parallel_size=plan.pp,
            context_parallel_size=plan.cp,
            expert_model_parallel_size=plan.ep,
            expert_tensor_parallel_size=plan.size("etp"),
            create_gloo_process_groups=False,
        )
        theirs = ProcessGroupCollection.use_mpu_process_groups()
        ours = mesh_groups(Mesh(plan, torch.device("cpu")), "test")
        fields = [*AXES_OF, "embd", "pos_embd", "intra_dp_cp", "intra_expt_dp"]
        state = {name: members(getattr(parallel_state, name)) for name in _STATE}
        state |= {name: tuple(getattr(parallel_state, name) or ()) or None for name in _RANKS}
        found.append((rank, *({field: members(getattr(groups, field, None)) for field in fields} for groups in (theirs, ours)), state))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return found


def members(group: Any) -> tuple[int, ...] | None:
    return tuple(dist.get_process_group_ranks(group)) if isinstance(group, dist.ProcessGroup) else None


@pytest.mark.parametrize("name", MADE)
def test_groups_that_megatron_makes_are_those_of_the_mesh(name):
    plan = MADE[name]
    ranks = sorted({0, 1, plan.world_size // 2, plan.world_size - 2, plan.world_size - 1})
    (outcome,) = run_ranks(made_by_megatron, 1, plan, ranks)
    assert len(outcome.value) == len(ranks)
    for rank, theirs, ours, state in outcome.value:
        stage = plan.coordinates(rank)["pp"]
        for field, axes in AXES_OF.items():
            assert ours[field] == plan.group_ranks(rank, axes), (rank, field)
            assert theirs[field] in (ours[field], None), (rank, field)
        assert theirs["tp"] and theirs["pp"] and theirs["dp_cp"] and theirs["expt_dp"] and theirs["tp_ep_pp"]
        assert ours["intra_dp_cp"] == theirs["intra_dp_cp"] and ours["intra_expt_dp"] == theirs["intra_expt_dp"]
        if plan.pp > 1:
            assert ours["embd"] == theirs["embd"] == ((ours["pp"][0], ours["pp"][-1]) if stage in (0, plan.pp - 1) else None)
            # elsewhere Megatron has none, and only asks for its size
            assert ours["pos_embd"] == (theirs["pos_embd"] if stage == 0 else (rank,))
        else:
            assert theirs["embd"] == (rank,) and ours["embd"] is None  # it sums over groups of more than one rank only
        for global_name, field in {**_STATE, **_RANKS}.items():
            without_cp = plan.cp > 1 and global_name == "_TENSOR_AND_DATA_PARALLEL_GROUP"  # cp is refused before it matters
            if field in AXES_OF and not without_cp:
                assert state[global_name] == ours[field], (rank, global_name)

"""Sizes, coordinates and groups of a plan."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle_core import MixleError, ParallelPlan, PlanError
from mixle_core.plan import AXES, EXPERT_AXES, mesh_axes


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    sizes = [draw(st.integers(1, 3)) for _ in AXES]
    return ParallelPlan(**dict(zip(AXES, sizes, strict=True)))


@st.composite
def plans_and_axes(draw: st.DrawFn) -> tuple[ParallelPlan, set[str]]:
    return draw(plans()), draw(st.sets(st.sampled_from(AXES)))


def test_sizes_multiply_to_the_world_but_expert_axes_do_not():
    plan = ParallelPlan(pp=2, dp_replicate=3, dp_shard=4, cp=5, tp=2, ep=4, etp=1)
    assert plan.world_size == 240
    assert plan.data_size == 60
    assert {axis: plan.size(axis) for axis in (*AXES, "edp", "ep", "etp")} == {
        "pp": 2,
        "dp_replicate": 3,
        "dp_shard": 4,
        "cp": 5,
        "tp": 2,
        "edp": 30,
        "ep": 4,
        "etp": 1,
    }


def test_etp_is_tp_unless_it_is_set_apart():
    assert ParallelPlan(dp_shard=4, tp=2, ep=2).size("etp") == 2
    assert ParallelPlan(dp_shard=4, tp=2, ep=2).size("edp") == 2


def test_an_update_has_microbatches_times_accumulation_backwards():
    assert ParallelPlan(microbatches=3, gradient_accumulation_steps=4).num_backwards == 12
    assert ParallelPlan().num_backwards == 1


def test_active_axes_stand_in_mesh_order():
    assert ParallelPlan().active == ()
    assert ParallelPlan(tp=2, dp_shard=2, dp_replicate=2, pp=2, cp=2).active == AXES
    assert ParallelPlan(dp_shard=4, ep=2).active == ("dp_shard", "ep")
    assert ParallelPlan(dp_shard=4, tp=2, ep=2, etp=2).active == ("dp_shard", "tp", "ep")


def test_executed_axes_are_those_that_split_the_forward():
    assert ParallelPlan(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2).executed_axes == ("pp", "cp", "tp", "ep")
    assert ParallelPlan(dp_replicate=2, dp_shard=2).executed_axes == ()


def test_an_etp_set_apart_from_tp_has_to_be_executed():
    assert ParallelPlan(dp_shard=2, tp=2, etp=1).executed_axes == ("tp", "etp")
    assert ParallelPlan(dp_shard=2, tp=2, etp=4).executed_axes == ("tp", "etp")


def test_describe_names_the_axes_above_one():
    assert ParallelPlan(dp_shard=2, tp=4).describe() == "dp_shard=2 x tp=4"
    assert ParallelPlan().describe() == "one process"


def test_ranks_of_a_tp_group_are_neighbours():
    plan = ParallelPlan(pp=2, dp_shard=2, tp=2)
    assert plan.coordinates(5) == {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 1}
    assert list(plan.coordinates(5)) == list(AXES)
    assert plan.group_ranks(5, ["tp"]) == (4, 5)
    assert plan.group_ranks(5, ["dp_shard"]) == (5, 7)
    assert plan.group_ranks(5, ["pp"]) == (1, 5)
    assert plan.group_ranks(5, ["tp", "pp"]) == (0, 1, 4, 5)
    assert plan.group_ranks(5, []) == (5,)


@given(plans())
def test_rank_of_inverts_coordinates(plan):
    positions = [plan.coordinates(rank) for rank in range(plan.world_size)]
    assert [plan.rank_of(position) for position in positions] == list(range(plan.world_size))
    assert all(0 <= position[axis] < plan.size(axis) for position in positions for axis in AXES)


@given(plans_and_axes())
def test_groups_partition_the_world(plan_and_axes):
    plan, axes = plan_and_axes
    groups = [plan.group_ranks(rank, axes) for rank in range(plan.world_size)]
    assert all(len(group) == math.prod(plan.size(axis) for axis in axes) for group in groups)
    assert all(rank in group for rank, group in enumerate(groups))
    assert sorted(rank for group in set(groups) for rank in group) == list(range(plan.world_size))


@given(plans_and_axes())
def test_a_group_is_in_mesh_order_and_differs_only_on_its_axes(plan_and_axes):
    plan, axes = plan_and_axes
    rank = plan.world_size // 2
    group = plan.group_ranks(rank, axes)
    assert list(group) == sorted(group)
    fixed = {axis: value for axis, value in plan.coordinates(rank).items() if axis not in axes}
    assert all(fixed.items() <= plan.coordinates(other).items() for other in group)


@given(plans_and_axes())
def test_groups_over_axes_and_over_the_other_axes_meet_in_one_rank(plan_and_axes):
    plan, axes = plan_and_axes
    rank = plan.world_size - 1
    assert set(plan.group_ranks(rank, axes)) & set(plan.group_ranks(rank, set(AXES) - axes)) == {rank}


@st.composite
def folded_plans(draw: st.DrawFn) -> ParallelPlan:
    """Plans with any ep and etp that their ranks allow; etp may be left to tp."""
    plan = draw(plans())
    domain = plan.data_size * plan.tp
    etp = draw(st.sampled_from([None, *(size for size in range(1, domain + 1) if domain % size == 0)]))
    left = domain // (plan.tp if etp is None else etp)
    return attrs.evolve(plan, ep=draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0])), etp=etp)


def test_experts_see_the_same_ranks_folded_anew():
    plan = ParallelPlan(pp=2, dp_shard=4, tp=2, ep=2, etp=1)
    assert plan.coordinates(13, EXPERT_AXES) == {"pp": 1, "edp": 2, "ep": 1, "etp": 0}
    assert list(plan.coordinates(13, EXPERT_AXES)) == list(EXPERT_AXES)
    assert plan.group_ranks(13, ["ep"]) == (12, 13)
    assert plan.group_ranks(13, ["edp"]) == (9, 11, 13, 15)
    assert plan.group_ranks(13, ["pp", "ep"]) == (4, 5, 12, 13)


@given(folded_plans())
def test_both_views_number_every_rank_once(plan):
    for view in (AXES, EXPERT_AXES):
        positions = [plan.coordinates(rank, view) for rank in range(plan.world_size)]
        assert [plan.rank_of(position) for position in positions] == list(range(plan.world_size))
        assert len({tuple(position.values()) for position in positions}) == plan.world_size
        assert all(0 <= position[axis] < plan.size(axis) for position in positions for axis in view)


@given(folded_plans(), st.sets(st.sampled_from(EXPERT_AXES)))
def test_groups_of_the_expert_view_partition_the_world(plan, axes):
    groups = [plan.group_ranks(rank, axes) for rank in range(plan.world_size)]
    assert all(len(group) == math.prod(plan.size(axis) for axis in axes) for group in groups)
    assert all(rank in group and list(group) == sorted(group) for rank, group in enumerate(groups))
    assert sorted(rank for group in set(groups) for rank in group) == list(range(plan.world_size))


@given(folded_plans())
def test_the_stages_of_both_views_are_the_same_ranks(plan):
    """pp is outermost in both, so neither its groups nor the ranks inside a stage depend on the view."""
    for rank in range(plan.world_size):
        here = plan.coordinates(rank, EXPERT_AXES)
        elsewhere = [plan.rank_of({**here, "pp": stage}) for stage in range(plan.pp)]
        assert plan.coordinates(rank)["pp"] == here["pp"]
        assert plan.group_ranks(rank, ["pp"]) == tuple(elsewhere)
        assert plan.group_ranks(rank, ["edp", "ep", "etp"]) == plan.group_ranks(rank, ["dp_replicate", "dp_shard", "cp", "tp"])


@given(plans(), st.sets(st.sampled_from(EXPERT_AXES[1:]), min_size=1), st.sets(st.sampled_from(AXES[1:]), min_size=1))
def test_axes_of_both_views_do_not_mix_and_are_named(plan, expert, dense):
    with pytest.raises(PlanError) as caught:
        plan.group_ranks(0, expert | dense | {"pp"})
    assert str(caught.value) == (
        f"axis {', '.join(sorted(expert))}: expected some of pp, dp_replicate, dp_shard, cp, tp; or, of experts, of pp, edp, ep, etp"
    )


def test_the_view_of_some_axes_is_the_first_that_has_them_all():
    assert mesh_axes([]) == mesh_axes(["pp"]) == mesh_axes(["tp", "cp"]) == AXES
    assert mesh_axes(["ep"]) == mesh_axes(["pp", "edp"]) == EXPERT_AXES
    with pytest.raises(PlanError, match=r"^axis dim: expected some of pp, dp_replicate"):
        mesh_axes(["ep", "tp", "dim"])


@pytest.mark.parametrize("axis", [*AXES, "ep", "etp", "microbatches", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -2, 1.0, True, "2"])
def test_a_size_that_is_no_positive_integer_is_refused(axis, value):
    with pytest.raises(PlanError) as caught:
        ParallelPlan(**{axis: value})
    assert str(caught.value) == f"{axis}={value!r}: expected an integer of at least 1"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"precision": "fp16"}, "precision='fp16': expected one of fp32, bf16"),
        ({"timeout_s": 0}, "timeout_s=0: expected a number of seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: expected a number of seconds above 0"),
        (
            {"sequence_parallel": True, "dp_shard": 2},
            "sequence_parallel=True with tp=1: it shards activations over tp; set tp above 1 or leave it out",
        ),
        ({"dp_shard": 4, "ep": 3}, "ep=3 times etp=1 does not divide the 4 ranks of data and tp together; choose ep and etp that do"),
        (
            {"dp_shard": 2, "tp": 2, "etp": 3},
            "ep=1 times etp=3 does not divide the 4 ranks of data and tp together; choose ep and etp that do",
        ),
    ],
)
def test_numbers_that_cannot_be_true_are_refused(fields, text):
    with pytest.raises(PlanError) as caught:
        ParallelPlan(**fields)
    assert str(caught.value) == text
    assert isinstance(caught.value, MixleError)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_axis_is_refused_with_the_known_ones():
    with pytest.raises(PlanError) as caught:
        ParallelPlan().size("dp")
    assert str(caught.value) == "axis 'dp': expected one of pp, dp_replicate, dp_shard, cp, tp, edp, ep, etp"


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(PlanError) as caught:
        ParallelPlan(dp_shard=4).coordinates(rank)
    assert str(caught.value) == f"rank {rank}: expected 0 to 3 for this plan"


def test_a_plan_is_frozen_keyword_only_and_returns_from_its_dict():
    plan = ParallelPlan(dp_shard=2, tp=2, precision="bf16", unused_parameters=True)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan.tp = 4
    with pytest.raises(TypeError):
        ParallelPlan(2)
    assert ParallelPlan(**plan.as_dict()) == plan
    assert plan.as_dict()["etp"] is None


def test_a_misspelt_axis_is_an_error_and_not_a_group_of_one():
    with pytest.raises(PlanError, match="axis dp_shards: expected some of pp, dp_replicate, dp_shard, cp, tp"):
        ParallelPlan(dp_shard=2).group_ranks(0, ["dp_shards"])

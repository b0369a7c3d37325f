"""Rows of parameters that some ranks of an axis hold, rows of experts, and claims on final gradients."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle_core import Claim, OwnershipError, ParallelPlan, Replica, Role, Row, Shard
from mixle_core.ownership import arbitrate, describe_role, make_row, pending_axes
from mixle_core.plan import AXES, EXPERT_AXES

from ..fakes import Model, Parameter, claim, declare, roles  # noqa: TID252 - the helpers of the kernel's tests

EVERY = {*AXES, *EXPERT_AXES}
STAGES = ParallelPlan(pp=4, dp_replicate=2)
FOLDED = ParallelPlan(pp=2, dp_shard=4, tp=2, ep=2, etp=2)


def one(plan: ParallelPlan, by_axis: dict[str, Role], **fields: object) -> Row:
    """The row of one matrix with these roles, for an owner that reduces over everything."""
    model = Model({"w.weight": Parameter(8, 4)})
    layout = declare(model, plan, *(roles(axis, w=role) for axis, role in by_axis.items())).parameters["w.weight"]
    return make_row(plan, layout, "alpha", claim(["w.weight"], **{"axes": EVERY, **fields}))


def holders(plan: ParallelPlan, row: Row) -> list[int]:
    """Ranks that hold it."""
    return [rank for rank in range(plan.world_size) if row.held_by(plan, rank)]


def test_an_embedding_tied_over_first_and_last_stage_is_summed_over_the_two():
    row = one(STAGES, {"pp": Replica("partial", ranks=(0, 3))})
    assert row.pending == row.reduced == ("pp", "dp_replicate")
    assert row.operation_text() == "sum over pp x dp_replicate" and row.role_text() == "pp: Replica(partial, ranks=[0, 3])"
    assert (row.group_size, row.copies, row.scale, row.local_shape, row.payload_bytes) == (4, 4, 1.0, (8, 4), 8 * 4 * 4)
    assert holders(STAGES, row) == [0, 1, 6, 7]
    assert row.model_replica_axes == ("pp",)


def test_a_layer_of_one_stage_has_nothing_pending_on_pp():
    row = one(STAGES, {"pp": Replica(ranks=(2,))})
    assert row.pending == ("dp_replicate",) and (row.group_size, row.copies) == (2, 2)
    assert holders(STAGES, row) == [4, 5]
    assert one(ParallelPlan(pp=4), {"pp": Replica("partial", ranks=(2,))}).operation == "none"


def test_a_mean_over_complete_holders_divides_by_their_number():
    role = {"pp": Replica("complete", ranks=(0, 1, 3))}
    row = one(STAGES, role, averages=True)
    assert row.scale == pytest.approx(1 / 3) and (row.group_size, row.copies) == (6, 6)
    left_alone = one(STAGES, role)
    assert left_alone.reduced == ("dp_replicate",) and (left_alone.scale, left_alone.group_size, left_alone.copies) == (1.0, 2, 6)


def test_the_ranks_of_a_role_stand_in_its_words():
    assert describe_role(Replica("partial", ranks=(0, 3))) == "Replica(partial, ranks=[0, 3])"
    assert one(STAGES, {"pp": Replica(ranks=(1,))}).as_dict()["roles"] == {"pp": "Replica(complete, ranks=[1])"}


def test_an_expert_is_pending_on_edp_instead_of_the_data_axes():
    row = one(FOLDED, {"pp": Replica(ranks=(1,)), "ep": Shard(0), "etp": Replica("partial")})
    assert row.pending == row.reduced == ("edp", "etp")
    assert (row.local_shape, row.group_size, row.copies) == ((4, 4), 4, 4)
    assert holders(FOLDED, row) == list(range(8, 16))
    assert row.model_replica_axes == ("etp",)
    dense = one(FOLDED, {"pp": Replica(ranks=(1,)), "tp": Shard(0)})
    assert dense.pending == ("dp_shard",) and (dense.group_size, dense.copies) == (4, 4)


def test_an_expert_that_one_rank_holds_whole_is_held_where_the_expert_view_says():
    row = one(FOLDED, {"ep": Replica(ranks=(1,)), "etp": Shard(0)})
    assert row.pending == ("edp",) and row.copies == 2
    assert holders(FOLDED, row) == [2, 3, 6, 7, 10, 11, 14, 15]


def test_an_owner_of_data_axes_does_not_cover_the_data_axis_of_experts():
    with pytest.raises(OwnershipError, match=r"does not reduce over its pending axis edp \(pending: edp\); way out"):
        one(FOLDED, {"ep": Shard(0), "etp": Shard(1)}, axes={"dp_replicate", "dp_shard", "cp", "tp"})


@given(
    pp=st.integers(2, 4),
    data=st.sampled_from([1, 2, 4]),
    held=st.sets(st.integers(0, 3), min_size=1),
    expert=st.booleans(),
    averages=st.booleans(),
    gradient=st.sampled_from(["complete", "partial"]),
)
def test_copies_and_group_follow_from_who_holds_it(pp, data, held, expert, averages, gradient):
    """The ranks that hold it are its copies, and those that are not left alone are the group."""
    plan = ParallelPlan(pp=pp, dp_shard=data, tp=2, ep=2, etp=1)
    ranks = tuple(sorted({position % pp for position in held}))
    row = one(
        plan,
        {"pp": Replica(gradient, ranks=ranks), **({"ep": Shard(0), "etp": Replica()} if expert else {"tp": Shard(0)})},
        averages=averages,
    )
    assert len(holders(plan, row)) == 2 * row.copies
    alone = len(ranks) if gradient == "complete" and not averages else 1
    assert row.group_size * alone == row.copies
    assert row.scale == pytest.approx(1 / len(ranks) if gradient == "complete" and averages else 1.0)
    assert ("pp" in row.pending) is (len(ranks) > 1)
    assert ({"edp"} if expert else {"dp_shard"}) & set(row.pending) == (({"edp"} if expert else {"dp_shard"}) if data > 1 else set())


def test_nothing_is_pending_where_only_one_rank_stands_on_the_axis():
    known = declare(Model({"w.weight": Parameter(8, 4)}), ParallelPlan(), roles("pp", w=Replica("partial", ranks=(0,))))
    assert pending_axes(ParallelPlan(), known.parameters["w.weight"]) == ()


PIPE = ParallelPlan(pp=2)
"""`a` is tied over both stages, `b` and `c` are of one stage each: nothing of them is pending."""


def owned(*claims: tuple[str, Claim]) -> dict[str, str]:
    """Who owns each parameter of a pipeline."""
    model = Model({f"{name}.weight": Parameter(2) for name in "abc"})
    stages = roles("pp", a=Replica("partial"), b=Replica(ranks=(0,)), c=Replica(ranks=(1,)))
    table, winners = arbitrate(PIPE, declare(model, PIPE, stages), claims, [])
    assert {row.name: owner for owner, (_, rows) in winners.items() for row in rows} == {row.name: row.owner for row in table.rows}
    return {row.name[0]: row.owner for row in table.rows}


def final(*names: str, **fields: object) -> Claim:
    """A claim on final gradients too."""
    return claim([f"{name}.weight" for name in names], **{"axes": {"pp"}, "final": True, **fields})


def test_a_final_claim_gets_what_has_no_pending_axis_and_any_other_does_not():
    assert owned(("alpha", final("a", "b", "c"))) == dict.fromkeys("abc", "alpha")
    assert owned(("alpha", final("a", "b"))) == {"a": "alpha", "b": "alpha", "c": "local"}
    assert owned(("alpha", final("a", "b", "c", final=False, whole=False))) == {"a": "alpha", "b": "local", "c": "local"}


def test_a_final_claim_has_rows_without_an_operation():
    table, winners = arbitrate(
        PIPE, declare(Model({"b.weight": Parameter(2)}), PIPE, roles("pp", b=Replica(ranks=(0,)))), [("x", final("b"))], []
    )
    assert list(winners) == ["x"]
    assert attrs.asdict(table["b.weight"])["operation"] == "none" and table["b.weight"].group_size == 1


def test_a_final_claim_in_one_process_replaces_the_local_owner():
    known = declare(Model({"b.weight": Parameter(2)}), ParallelPlan())
    assert [row.owner for row in arbitrate(ParallelPlan(), known, [("x", final("b"))], [])[0].rows] == ["x"]


def test_two_final_claims_on_one_parameter_are_refused_with_both():
    with pytest.raises(
        OwnershipError, match=r"several for 2 of 3\n  b\.weight: claimed by alpha and beta\n  c\.weight: claimed by alpha and beta\n"
    ):
        owned(("alpha", final("a", "b", "c")), ("beta", final("b", "c")))


def test_a_final_claim_beside_another_on_a_pending_parameter_is_refused_with_both():
    with pytest.raises(OwnershipError, match=r"several for 1 of 2: a\.weight: claimed by alpha and beta; way out"):
        owned(("alpha", final("a", "b")), ("beta", final("a", final=False)))


def test_a_final_claim_takes_from_another_only_what_that_would_not_get():
    """Of `b`, without a pending axis, the other claim gets nothing with or without the final one beside it."""
    other = final("a", "b", final=False, whole=False)
    assert owned(("alpha", final("b", "c")), ("beta", other)) == {"a": "beta", "b": "alpha", "c": "alpha"}

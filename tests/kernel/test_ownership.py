"""Arbitration, and the arithmetic of the table's rows."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle_core import (
    CapabilityError,
    Claim,
    LayoutError,
    OwnershipError,
    OwnershipTable,
    ParallelPlan,
    PluginError,
    Refusal,
    Replica,
    Row,
    Shard,
    exactly_one,
)
from mixle_core.ownership import Bid, arbitrate, canonical_json, describe_role, make_row, pending_axes

from .fakes import DDP, FSDP, TP, Model, Parameter, claim, declare, layouts, model, roles


def row(plan: ParallelPlan, name: str, **fields: Any) -> Row:
    """The row that a claim gives the parameter."""
    return make_row(plan, layouts(plan).parameters[name], "alpha", claim([name], **fields))


def check(row: Row, **expected: Any) -> None:
    """Compare all fields that depend on plan and claim at once."""
    assert {name: getattr(row, name) for name in expected} == expected


def test_data_axes_are_pending_without_a_declaration_and_model_axes_by_role():
    plan = ParallelPlan(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    known = layouts(plan).parameters
    assert pending_axes(plan, known["up.weight"]) == ("dp_replicate", "dp_shard", "cp")
    assert pending_axes(plan, known["norm.weight"]) == ("dp_replicate", "dp_shard", "cp", "tp")
    assert pending_axes(plan, known["gate.weight"]) == ("dp_replicate", "dp_shard", "cp", "tp")
    assert pending_axes(ParallelPlan(), known["gate.weight"]) == ()


def test_a_table_reads_as_a_line_for_each_pattern():
    plan = ParallelPlan(dp_shard=2, tp=2)
    assert str(OwnershipTable(plan, tuple(row(plan, name, **FSDP) for name in ("norm.weight", "up.weight")))).splitlines() == [
        "norm.weight  alpha  tp: Replica(partial)  sum over dp_shard then tp, kept sharded",
        "up.weight    alpha  tp: Shard(0)          sum over dp_shard, kept sharded",
    ]
    assert str(OwnershipTable(plan, ())) == ""


def test_data_parallel_row():
    check(
        row(ParallelPlan(dp_replicate=4), "up.weight", **DDP),
        name="up.weight",
        owner="alpha",
        backend="torch_native",
        roles={},
        pending=("dp_replicate",),
        reduced=("dp_replicate",),
        operation="sum",
        scale=1.0,
        dtype="torch.float32",
        stages=(("dp_replicate",),),
        stored=(),
        group_size=4,
        shape=(8, 4),
        local_shape=(8, 4),
        param_dtype="torch.float32",
        itemsize=4,
        copies=4,
        payload_bytes=8 * 4 * 4,
        aliases=(),
    )


def test_half_precision_gradients_travel_in_fp32_and_others_as_they_are():
    plan = ParallelPlan(dp_replicate=2)
    check(row(plan, "norm.weight", **DDP), dtype="torch.float32", param_dtype="torch.bfloat16", itemsize=2, payload_bytes=4 * 4)
    check(row(plan, "wide.weight", **DDP), dtype="torch.float64", param_dtype="torch.float64", itemsize=8, payload_bytes=16 * 8)


def test_sharded_data_parallel_rows_in_stages():
    plan = ParallelPlan(dp_replicate=2, dp_shard=4, tp=2)
    check(
        row(plan, "up.weight", **FSDP),
        roles={"tp": Shard(0)},
        pending=("dp_replicate", "dp_shard"),
        reduced=("dp_replicate", "dp_shard"),
        operation="sum",
        scale=1.0,
        stages=(("dp_shard",), ("dp_replicate",)),
        stored=("dp_shard",),
        group_size=8,
        shape=(8, 4),
        local_shape=(4, 4),
        copies=2,
        payload_bytes=64 + 16,
    )
    check(
        row(plan, "norm.weight", **FSDP),
        roles={"tp": Replica("partial")},
        pending=("dp_replicate", "dp_shard", "tp"),
        reduced=("dp_replicate", "dp_shard", "tp"),
        operation="sum",
        scale=1.0,
        stages=(("dp_shard",), ("dp_replicate",), ("tp",)),
        stored=("dp_shard",),
        group_size=16,
        local_shape=(4,),
        copies=4,
        payload_bytes=16 + 4 + 4,
    )
    check(
        row(plan, "gate.weight", **FSDP),
        pending=("dp_replicate", "dp_shard", "tp"),
        reduced=("dp_replicate", "dp_shard"),
        operation="sum",
        scale=1.0,
        stages=(("dp_shard",), ("dp_replicate",)),
        stored=("dp_shard",),
        group_size=8,
        copies=4,
        payload_bytes=64 + 16,
    )


def test_stages_and_stored_axes_that_the_plan_does_not_have_vanish():
    check(
        row(ParallelPlan(dp_shard=2), "up.weight", **FSDP),
        stages=(("dp_shard",),),
        stored=("dp_shard",),
        group_size=2,
        copies=1,
        payload_bytes=128,
    )
    check(
        row(ParallelPlan(dp_replicate=2), "up.weight", **FSDP),
        stages=(("dp_replicate",),),
        stored=(),
        group_size=2,
        copies=2,
        payload_bytes=128,
    )


def test_tensor_parallel_rows_without_a_data_axis():
    plan = ParallelPlan(tp=4)
    check(
        row(plan, "norm.weight", **TP),
        pending=("tp",),
        reduced=("tp",),
        operation="sum",
        scale=1.0,
        stages=(("tp",),),
        group_size=4,
        copies=4,
        payload_bytes=16,
    )
    check(
        row(plan, "gate.weight", **TP),
        pending=("tp",),
        reduced=(),
        operation="none",
        scale=1.0,
        stages=(),
        group_size=1,
        copies=4,
        payload_bytes=0,
    )
    check(
        row(plan, "gate.weight", **TP, averages=True),
        pending=("tp",),
        reduced=("tp",),
        operation="mean",
        scale=0.25,
        stages=(("tp",),),
        group_size=4,
        copies=4,
        payload_bytes=64,
    )


def test_joint_rows_flatten_data_and_tensor_parallel_into_one_collective():
    plan = ParallelPlan(dp_replicate=2, tp=4)
    check(row(plan, "up.weight", **DDP), stages=(("dp_replicate",),), group_size=2, copies=2, scale=1.0, payload_bytes=32)
    check(row(plan, "norm.weight", **DDP), stages=(("dp_replicate", "tp"),), group_size=8, copies=8, scale=1.0, payload_bytes=16)
    check(row(plan, "gate.weight", **DDP), stages=(("dp_replicate",),), group_size=2, copies=8, scale=1.0, payload_bytes=64)
    check(
        row(plan, "gate.weight", **DDP, averages=True),
        operation="sum",
        scale=0.25,
        reduced=("dp_replicate", "tp"),
        stages=(("dp_replicate", "tp"),),
        group_size=8,
        copies=8,
        payload_bytes=64,
    )


def test_complete_and_partial_model_axes_mix_in_one_row():
    plan = ParallelPlan(pp=2, dp_replicate=3, tp=4)
    tied = declare(Model({"wte.weight": Parameter(8, 4)}), plan, roles("pp", wte=Replica("partial")), roles("tp", wte=Replica("complete")))
    fields = {"axes": {"pp", "dp_replicate", "tp"}, "averages": True}
    mixed = make_row(plan, tied.parameters["wte.weight"], "alpha", claim(["wte.weight"], **fields))
    check(
        mixed,
        pending=("pp", "dp_replicate", "tp"),
        reduced=("pp", "dp_replicate", "tp"),
        operation="sum",
        scale=0.25,
        group_size=24,
        copies=24,
    )
    assert mixed.model_replica_axes == ("pp", "tp")


def test_ranks_of_an_axis_nobody_declared_hold_other_values():
    check(row(ParallelPlan(pp=2, dp_replicate=4), "up.weight", **DDP), pending=("dp_replicate",), copies=4)


def test_a_row_keeps_the_roles_of_active_axes_only():
    parameter = layouts(ParallelPlan(tp=2)).parameters["norm.weight"]
    one, two = (make_row(plan, parameter, "alpha", claim(["norm.weight"], **DDP)) for plan in (ParallelPlan(), ParallelPlan(tp=2)))
    assert (one.roles, one.role_text(), one.model_replica_axes) == ({}, "-", ())
    assert (two.roles, two.role_text(), two.model_replica_axes) == ({"tp": Replica("partial")}, "tp: Replica(partial)", ("tp",))


@given(
    sizes=st.fixed_dictionaries({axis: st.sampled_from([1, 2, 4]) for axis in ("dp_replicate", "dp_shard", "cp", "tp")}),
    name=st.sampled_from(["up.weight", "norm.weight", "gate.weight"]),
    averages=st.booleans(),
    stored=st.booleans(),
)
def test_what_holds_for_every_row(sizes, name, averages, stored):
    plan = ParallelPlan(**sizes)
    made = row(plan, name, axes=set(sizes), averages=averages, stored=("dp_shard",) if stored else ())
    shards = sizes["dp_shard"] if stored else 1
    cut = sizes["tp"] if name == "up.weight" else 1
    assert made.copies * shards * cut == plan.world_size
    assert made.group_size == plan.world_size // (sizes["tp"] if name == "up.weight" or (name == "gate.weight" and not averages) else 1)
    assert made.scale == (1 / sizes["tp"] if name == "gate.weight" and averages else 1.0)
    assert (made.operation == "none") is (made.group_size == 1) is (made.payload_bytes == 0)
    assert set(made.stored) <= set(made.reduced) <= set(made.pending)


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (Replica(), "Replica(complete)"),
        (Replica("partial"), "Replica(partial)"),
        (Shard(1), "Shard(1)"),
        (Shard(0, unit=64, unit_name="head"), "Shard(0, unit=64)"),
        (Shard(0, unit=2, parts=(8, 4)), "Shard(0, unit=2, parts=[8, 4])"),
    ],
)
def test_roles_in_words(role, text):
    assert describe_role(role) == text


def test_a_claim_that_misses_a_pending_axis_is_refused():
    plan = ParallelPlan(dp_replicate=2, tp=2)
    known = layouts(plan)
    with pytest.raises(OwnershipError) as caught:
        arbitrate(plan, known, [("alpha", claim(known.trainable, axes={"dp_replicate"}))], [])
    assert str(caught.value) == (
        "alpha claims gate.weight but does not reduce over its pending axis tp (pending: dp_replicate, tp); "
        "way out: a claim covers every pending axis, or leave the parameter to another owner"
    )


@pytest.mark.parametrize("stages", [(("dp_shard",),), (("dp_shard", "tp"), ("tp",))])
def test_stages_that_do_not_cover_each_axis_once_are_refused(stages):
    with pytest.raises(OwnershipError) as caught:
        row(ParallelPlan(dp_shard=2, tp=2), "norm.weight", **{**FSDP, "stages": stages})
    assert str(caught.value) == (
        f"alpha claims norm.weight with stages {list(stages)}, which do not cover each of dp_shard, tp once; "
        "way out: every axis of a claim stands in one of its stages"
    )


def test_every_trainable_parameter_gets_its_row_in_name_order():
    plan = ParallelPlan(dp_replicate=2)
    known = declare(Model({"b": Parameter(2), "c": Parameter(2, requires_grad=False), "a": Parameter(2)}), plan)
    table, winners = arbitrate(plan, known, [("alpha", claim(["a", "b", "c"]))], [])
    assert [found.name for found in table.rows] == ["a", "b"]
    assert table.owners == ("alpha",)
    assert len(table) == 2
    assert list(winners) == ["alpha"]
    assert winners["alpha"][1] == table.rows


def test_a_parameter_without_a_pending_axis_belongs_to_the_local_owner():
    plan = ParallelPlan(tp=2)
    known = layouts(plan)
    table, winners = arbitrate(plan, known, [("alpha", claim(["norm.weight", "gate.weight"], **TP))], [])
    assert {found.name: found.owner for found in table.rows} == {
        "gate.weight": "alpha",
        "norm.weight": "alpha",
        "up.weight": "local",
        "wide.weight": "local",
    }
    assert list(winners) == ["alpha", "local"]
    check(
        table["up.weight"],
        backend="local",
        pending=(),
        reduced=(),
        operation="none",
        scale=1.0,
        stages=(),
        stored=(),
        group_size=1,
        local_shape=(4, 4),
        copies=1,
        payload_bytes=0,
    )


def test_one_process_needs_no_claim():
    plan = ParallelPlan()
    table, _ = arbitrate(plan, layouts(plan), [], [("alpha", Refusal("nothing to reduce", "add ranks"))], backends=("torch_native",))
    assert table.owners == ("local",)


def test_several_plugins_may_own_disjoint_parameters():
    plan = ParallelPlan(dp_replicate=2)
    known = declare(Model({"a": Parameter(2), "b": Parameter(2)}), plan)
    first, second = claim(["a"]), claim(["b"])
    table, winners = arbitrate(plan, known, [("beta", second), ("alpha", first)], [])
    assert [found.owner for found in table.rows] == ["alpha", "beta"]
    assert {owner: (won, [found.name for found in rows]) for owner, (won, rows) in winners.items()} == {
        "alpha": (first, ["a"]),
        "beta": (second, ["b"]),
    }


def test_two_claims_of_one_plugin_make_two_owners():
    plan = ParallelPlan(dp_shard=2)
    known = declare(Model({"a": Parameter(2), "b": Parameter(2), "c": Parameter(2)}), plan)
    kept, cut = claim(["a", "c"], axes={"dp_shard"}), claim(["b"], axes={"dp_shard"}, stored=("dp_shard",))
    table, winners = arbitrate(plan, known, [("alpha", cut), ("alpha", kept)], [])
    assert [(found.name, found.owner, found.stored) for found in table.rows] == [
        ("a", "alpha", ()),
        ("b", "alpha/2", ("dp_shard",)),
        ("c", "alpha", ()),
    ]
    assert {owner: won for owner, (won, _) in winners.items()} == {"alpha": kept, "alpha/2": cut}


def test_two_claims_for_one_parameter_are_refused_with_both():
    plan = ParallelPlan(dp_replicate=2)
    known = declare(Model({f"layers.{i}.w": Parameter(2) for i in range(2)}), plan)
    claims = [("alpha", claim(known.trainable)), ("beta", claim(["layers.1.w"]))]
    with pytest.raises(OwnershipError) as caught:
        arbitrate(plan, known, claims, [], labels={"alpha": "alpha (mixle-alpha 1.0)", "beta": "beta (mixle-beta 2.0)"})
    assert str(caught.value) == (
        "each trainable parameter needs exactly one owner; several for 1 of 2: "
        "layers.1.w: claimed by alpha (mixle-alpha 1.0) and beta (mixle-beta 2.0); "
        "way out: choose with backend=..., or leave one of them out of MIXLE_PLUGINS"
    )


def test_no_claim_is_refused_with_every_refusal():
    plan = ParallelPlan(dp_shard=2)
    known = declare(Model({"layers.0.w": Parameter(2), "layers.1.w": Parameter(2), "norm": Parameter(2)}), plan)
    refusals = [("alpha", Refusal("dp_shard=2 shards parameters", "set dp_shard=1")), ("beta", Refusal("no", "ask gamma"))]
    with pytest.raises(OwnershipError) as caught:
        arbitrate(plan, known, [], refusals, labels={"alpha": "alpha (mixle-alpha 1.0)"})
    assert str(caught.value) == (
        "each trainable parameter needs exactly one owner; none for 3 of 3\n"
        "  alpha (mixle-alpha 1.0) declined: dp_shard=2 shards parameters; set dp_shard=1\n"
        "  beta declined: no; ask gamma\n"
        "  layers.*.w (2 of them)\n"
        "  norm\n"
        "way out: install or enable a plugin that owns these axes, or change the plan as the refusals say"
    )


def test_a_parameter_left_out_of_the_only_claim_is_refused():
    plan = ParallelPlan(dp_replicate=2)
    known = declare(Model({"a": Parameter(2), "head.w": Parameter(2)}), plan)
    with pytest.raises(OwnershipError) as caught:
        arbitrate(plan, known, [("alpha", claim(["a"]))], [])
    assert str(caught.value).startswith("each trainable parameter needs exactly one owner; none for 1 of 2: head.w; way out: ")


def test_a_whole_claim_that_gets_only_some_is_refused():
    plan = ParallelPlan(tp=2)
    known = layouts(plan)
    with pytest.raises(OwnershipError) as caught:
        arbitrate(plan, known, [("alpha", claim(known.trainable, **TP))], [])
    assert str(caught.value) == (
        "alpha claims 4 parameters as a whole and gets 2; without it: up.weight, which has no pending axis; "
        "way out: leave it out of the claim, or claim with whole=False"
    )
    table, _ = arbitrate(plan, known, [("alpha", claim(known.trainable, **TP, whole=False))], [])
    assert [found.owner for found in table.rows] == ["alpha", "alpha", "local", "local"]


def test_a_whole_claim_may_name_frozen_parameters():
    plan = ParallelPlan(dp_replicate=2)
    known = declare(Model({"a": Parameter(2), "frozen": Parameter(2, requires_grad=False)}), plan)
    table, _ = arbitrate(plan, known, [("alpha", claim(["a", "frozen"]))], [])
    assert [found.name for found in table.rows] == ["a"]


def test_a_model_without_trainable_parameters_is_refused():
    plan = ParallelPlan(dp_replicate=2)
    with pytest.raises(LayoutError) as caught:
        arbitrate(plan, declare(Model({"a": Parameter(2, requires_grad=False)}), plan), [], [])
    assert str(caught.value) == "the model has no trainable parameter; set requires_grad on those that training should change"


def test_a_plugin_cannot_take_the_name_of_the_local_owner():
    plan = ParallelPlan(dp_replicate=2)
    known = declare(Model({"a": Parameter(2)}), plan)
    with pytest.raises(PluginError) as caught:
        arbitrate(plan, known, [("local", claim(["a"]))], [])
    assert str(caught.value) == "a plugin named 'local' claims parameters; that is the core's own owner; way out: rename the plugin"


AB = Model({"a": Parameter(2), "b": Parameter(2)})
DP2 = ParallelPlan(dp_replicate=2)


def owners(claims: list[tuple[str, Claim]], *backends: str) -> list[str]:
    """Owners of `a` and `b`."""
    return [found.owner for found in arbitrate(DP2, declare(AB, DP2), claims, [], backends=backends)[0].rows]


def test_the_preferred_backend_that_owns_everything_wins():
    claims = [("alpha", claim(["a", "b"], backend="x")), ("beta", claim(["a", "b"], backend="y"))]
    assert owners(claims, "x") == ["alpha", "alpha"]
    assert owners(claims, "y") == ["beta", "beta"]
    assert owners(claims, "y", "x") == ["beta", "beta"]
    assert owners(claims, "z", "x") == ["alpha", "alpha"]


def test_a_preferred_backend_that_owns_only_some_is_passed_over():
    claims = [("alpha", claim(["a"], backend="x")), ("beta", claim(["a", "b"], backend="y"))]
    assert owners(claims, "x", "y") == ["beta", "beta"]


def test_the_first_failure_is_told_when_no_preferred_backend_owns_everything():
    claims = [("alpha", claim(["a"], backend="x")), ("beta", claim(["b"], backend="y"))]
    with pytest.raises(OwnershipError, match="none for 1 of 2: b; way out"):
        owners(claims, "x", "y")
    with pytest.raises(OwnershipError, match="none for 1 of 2: a; way out"):
        owners(claims, "y", "x")


def test_without_a_preference_backends_compete():
    claims = [("alpha", claim(["a", "b"], backend="x")), ("beta", claim(["a", "b"], backend="y"))]
    with pytest.raises(OwnershipError, match="several for 2 of 2\n  a: claimed by alpha and beta\n  b: claimed by alpha and beta\n"):
        owners(claims)


def test_a_backend_without_a_claim_is_refused_with_those_that_claim_and_every_refusal():
    known = declare(AB, DP2)
    claims = [("beta", claim(["a", "b"], backend="y")), ("alpha", claim([], backend="x"))]
    with pytest.raises(CapabilityError) as caught:
        arbitrate(
            DP2, known, claims, [("gamma", Refusal("too small", "grow"))], backends=("v", "w"), labels={"gamma": "gamma (mixle-gamma 3.0)"}
        )
    assert str(caught.value) == (
        "backend v or w: no plugin of it owns dp_replicate=2: gamma (mixle-gamma 3.0) declined: too small; grow; "
        "way out: backends that claim here: x, y"
    )
    with pytest.raises(CapabilityError) as caught:
        arbitrate(DP2, known, [], [], backends=("v",))
    assert str(caught.value) == (
        "backend v: no plugin of it owns dp_replicate=2; way out: install a plugin of this backend, or change the plan"
    )


def test_exactly_one_returns_the_only_bid_and_ignores_keys_nobody_asked_for():
    first, second = Bid("alpha", ["a", "z"], 1), Bid("beta", ["b"], 2)
    won = exactly_one(["a", "b"], [first, second], what="rule", way_out={})
    assert won == {"a": first, "b": second}
    assert exactly_one([], [first], what="rule", way_out={}) == {}


def test_exactly_one_raises_the_errors_it_is_given():
    way_out = {"nobody": "bid", "several": "withdraw"}
    with pytest.raises(CapabilityError, match=r"^rule; none for 1 of 1: a; way out: bid$"):
        exactly_one(["a"], [], what="rule", way_out=way_out, nobody=CapabilityError)
    with pytest.raises(LayoutError, match=r"^rule; several for 1 of 1: a: claimed by x and y and z; way out: withdraw$"):
        exactly_one(["a"], [Bid(who, ["a"]) for who in "xyz"], what="rule", way_out=way_out, several=LayoutError)


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sets(st.sampled_from("abc"))), max_size=4))
def test_exactly_one_answers_only_when_every_key_has_one_bid(offers):
    bids = [Bid(who, keys) for who, keys in offers]
    counts = {key: sum(key in bid.keys for bid in bids) for key in "abc"}
    if set(counts.values()) == {1}:
        won = exactly_one("abc", bids, what="rule", way_out={})
        assert all(key in won[key].keys for key in "abc")
        return
    with pytest.raises(OwnershipError) as caught:
        exactly_one("abc", bids, what="rule", way_out={"nobody": "bid", "several": "withdraw"})
    assert str(caught.value).endswith("way out: bid" if 0 in counts.values() else "way out: withdraw")


def test_a_table_answers_by_name_and_by_alias():
    tied = Parameter(4, 2)
    known = declare(Model({"wte.w": tied, "head.w": tied}), DP2)
    table, _ = arbitrate(DP2, known, [("alpha", claim(["wte.w"]))], [])
    assert table["head.w"] is table["wte.w"]
    assert table["wte.w"].aliases == ("head.w",)
    with pytest.raises(KeyError, match="nothing"):
        table["nothing"]


def test_rows_that_differ_only_in_numbers_are_shown_together():
    plan = ParallelPlan(dp_replicate=2)
    parameters = {f"layers.{i}.w": Parameter(2) for i in range(3)} | {"layers.3.w": Parameter(3), "head": Parameter(2)}
    known = declare(Model(parameters), plan)
    table, _ = arbitrate(plan, known, [("alpha", claim(known.trainable))], [])
    assert [(pattern, len(rows)) for pattern, rows in table.by_pattern()] == [("head", 1), ("layers.*.w", 3), ("layers.3.w", 1)]


def test_a_table_is_json():
    plan = ParallelPlan(dp_replicate=2, tp=2)
    known = layouts(plan)
    table, _ = arbitrate(plan, known, [("alpha", claim(known.trainable, **DDP))], [])
    document = json.loads(json.dumps(attrs.evolve(table, executors={"tp": "beta"}).as_dict()))
    assert document["executors"] == {"tp": "beta"}
    assert document["plan"] == plan.as_dict()
    assert document["rows"][3]["roles"] == {"tp": "Shard(0)"}
    assert document["rows"][1]["stages"] == [["dp_replicate", "tp"]]


def test_canonical_json_depends_on_values_alone():
    assert canonical_json({"b": (1, 2), "a": None}) == canonical_json({"a": None, "b": [1, 2]}) == '{"a":null,"b":[1,2]}'


def table_of(plan: ParallelPlan, parameters: dict[str, Parameter] | None = None, reverse: bool = False, **fields: Any) -> OwnershipTable:
    """A table of two claims over the parameters of `model()`, or over others of the same names."""
    found = roles("tp", up=Shard(0), norm=Replica("partial"), gate=Replica("complete"), wide=Shard(0))
    known = declare(Model(parameters or model().parameters), plan, found)
    claims = [("alpha", claim(["up.weight", "norm.weight"], **{**DDP, **fields})), ("beta", claim(["gate.weight", "wide.weight"], **DDP))]
    return arbitrate(plan, known, claims[::-1] if reverse else claims, [])[0]


def test_a_digest_is_the_hash_of_the_whole_table():
    table = table_of(ParallelPlan(dp_replicate=2, tp=2))
    assert table.digest == hashlib.sha256(canonical_json(table.as_dict()).encode()).hexdigest()


def test_a_digest_does_not_depend_on_any_order():
    plan = ParallelPlan(dp_replicate=2, tp=2)
    backwards = table_of(plan, dict(reversed(model().parameters.items())), reverse=True)
    assert backwards == table_of(plan)
    assert backwards.digest == table_of(plan).digest


def test_a_digest_depends_on_everything_else():
    plan = ParallelPlan(dp_replicate=2, tp=2)
    table = table_of(plan)
    parameters = model().parameters
    others = [
        attrs.evolve(table, executors={"tp": "beta"}),
        table_of(attrs.evolve(plan, microbatches=2)),
        table_of(plan, averages=True, backend="other"),
        table_of(plan, {**parameters, "norm.weight": Parameter(4)}),
        table_of(plan, {**parameters, "up.weight": Parameter(16, 4)}),
        table_of(plan, {**parameters, "up.weight": Parameter(8, 4, requires_grad=False)}),
    ]
    assert len({table.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_digest_is_the_same_in_every_process():
    code = """
from mixle_core import Claim, Layouts, ParallelPlan, ParameterLayout, Replica
from mixle_core.ownership import arbitrate
plan = ParallelPlan(dp_replicate=2, dp_shard=2, tp=2)
names = [f"layers.{i}.w" for i in range(20)]
facts = [ParameterLayout(name=n, shape=(4,), dtype="torch.float32", itemsize=4, trainable=True, roles={"tp": Replica()}) for n in names]
layouts = Layouts(parameters={fact.name: fact for fact in facts}, modules={}, units=())
claims = [(f"p{i}", Claim(owner=int, parameters=names[i::2], axes=["tp", "dp_shard", "dp_replicate"], backend="x")) for i in range(2)]
print(arbitrate(plan, layouts, claims, [])[0].digest)
"""
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2", "3")]
    outputs = {
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout for env in environments
    }
    assert [len(output.strip()) for output in outputs] == [64]

"""Roles, patterns, logical names and tied parameters."""

from __future__ import annotations

import re

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixle_core import Boundary, LayoutError, Layouts, ModelLayout, ModuleLayout, ParameterLayout, Replica, Shard, Term
from mixle_core.layout import WRAPPER_SEGMENTS, generalise, is_held, join, logical_name, matches, num_holders, tied_names

from .fakes import Model, Parameter

SEGMENTS = st.sampled_from(["a", "b", "q_proj", "0", "12"])
NAMES = st.lists(SEGMENTS, min_size=1, max_size=5).map(".".join)
PATTERNS = st.lists(st.sampled_from(["a", "b", "0", "*", "**", "{a,b}", "{q,k}_proj"]), min_size=1, max_size=5)


def covers(pattern: list[str], name: list[str]) -> bool:
    """The meaning of patterns, segment by segment."""
    if not pattern:
        return not name
    head, *rest = pattern
    if head == "**":
        return any(covers(rest, name[i:]) for i in range(len(name) + 1))
    alternatives = {"{a,b}": ("a", "b"), "{q,k}_proj": ("q_proj", "k_proj")}.get(head, (head,))
    return bool(name) and (head == "*" or name[0] in alternatives) and covers(rest, name[1:])


@pytest.mark.parametrize(
    ("pattern", "name", "covered"),
    [
        ("up.weight", "up.weight", True),
        ("up.weight", "up.weights", False),
        ("up.weight", "up_weight", False),
        ("up", "up.weight", False),
        ("layers.*.up", "layers.12.up", True),
        ("layers.*.up", "layers.up", False),
        ("layers.*.up", "layers.1.2.up", False),
        ("*_proj", "q_proj", True),
        ("q*", "q", True),
        ("*", "", False),
        ("**.weight", "weight", True),
        ("**.weight", "a.b.weight", True),
        ("**.weight", "a.bweight", False),
        ("layers.**", "layers", True),
        ("layers.**", "layers.0.up", True),
        ("layers.**", "layersx", False),
        ("a.**.b", "a.b", True),
        ("a.**.b", "a.x.y.b", True),
        ("**", "", True),
        ("**", "a.b", True),
        ("**.*", "", False),
        ("**.*", "a", True),
        ("{q,k}_proj.weight", "k_proj.weight", True),
        ("{q,k}_proj.weight", "v_proj.weight", False),
        ("{a.*,b}.weight", "a.3.weight", True),
        ("{a.**,b}.weight", "a.weight", True),
        ("a+b.w", "a+b.w", True),
        ("a.w", "axw", False),
    ],
)
def test_a_pattern_covers_whole_names(pattern, name, covered):
    assert matches(pattern, name) is covered


@given(PATTERNS, NAMES)
def test_patterns_mean_what_they_mean_segment_by_segment(pattern, name):
    assert matches(".".join(pattern), name) is covers(pattern, name.split("."))


@given(NAMES)
def test_a_name_is_covered_by_itself_and_by_its_general_form(name):
    assert matches(name, name)
    assert matches(generalise(name), name)


def test_an_open_brace_is_refused_with_an_example():
    with pytest.raises(LayoutError) as caught:
        matches("layers.{q,k_proj", "layers.q_proj")
    assert str(caught.value) == "pattern 'layers.{q,k_proj': '{' without '}'; alternatives look like {q,k}_proj"


def test_generalise_replaces_numeric_segments_only():
    assert generalise("layers.12.mlp.0.w1.weight") == "layers.*.mlp.*.w1.weight"
    assert generalise("w1") == "w1"


def test_join_leaves_out_the_root():
    assert join("", "weight") == "weight"
    assert join("up", "weight") == "up.weight"


@pytest.mark.parametrize("segment", sorted(WRAPPER_SEGMENTS))
def test_wrapper_segments_vanish_at_any_depth(segment):
    assert logical_name(f"{segment}.layers.0.{segment}.up.weight") == "layers.0.up.weight"
    assert logical_name(segment) == ""
    assert logical_name(f"{segment}s.up") == f"{segment}s.up"


def test_transparent_segments_vanish_whole_segments_at_a_time():
    assert logical_name("base_model.model.layers.0.up", ["base_model.model"]) == "layers.0.up"
    assert logical_name("outer.base_model.model.up", ["base_model.model"]) == "outer.up"
    assert logical_name("my_base_model.model.up", ["base_model.model"]) == "my_base_model.model.up"
    assert logical_name("base_model.models.up", ["base_model.model"]) == "base_model.models.up"
    assert logical_name("up.base_layer.weight", ["base_layer"]) == "up.weight"
    assert logical_name("a.b.up", ["b", "a"]) == "up"


def test_a_transparent_segment_vanishes_as_often_as_it_occurs():
    assert logical_name("base.base.up.base.weight", ["base"]) == "up.weight"


@given(st.lists(st.sampled_from([*sorted(WRAPPER_SEGMENTS), "hidden", "a", "b"]), min_size=1, max_size=6).map(".".join))
def test_a_logical_name_is_its_own_logical_name(raw):
    name = logical_name(raw, ["hidden"])
    assert logical_name(name, ["hidden"]) == name


def test_tied_names_are_sorted_and_keep_every_alias_under_the_first_name():
    tied = Parameter(4, 2)
    model = Model({"wte.weight": tied, "a.weight": Parameter(2), "lm_head.weight": tied, "copy.weight": tied})
    found = tied_names(model)
    assert list(found) == ["a.weight", "wte.weight"]
    assert found["wte.weight"] == (tied, ("lm_head.weight", "copy.weight"))
    assert found["a.weight"][1] == ()


def test_one_parameter_under_two_raw_names_of_one_logical_name_is_no_alias():
    shared = Parameter(2)
    assert tied_names(Model({"up.weight": shared, "module.up.weight": shared})) == {"up.weight": (shared, ())}


def test_two_parameters_with_one_logical_name_are_refused():
    model = Model({"up.weight": Parameter(2), "module.up.weight": Parameter(2)})
    with pytest.raises(LayoutError) as caught:
        tied_names(model)
    assert str(caught.value) == (
        "two different parameters have the logical name 'up.weight' (one of them is 'module.up.weight'); "
        "rename the module whose name is a wrapper segment or a transparent one"
    )


def test_roles_are_equal_by_what_they_mean():
    assert Replica() == Replica("complete")
    assert Replica("complete") != Replica("partial")
    assert Shard(0, unit=2, unit_name="head") == Shard(0, unit=2, unit_name="unit")
    assert len({Shard(0, parts=[2, 4]), Shard(0, parts=(2, 4)), Shard(0), Shard(1)}) == 3
    assert Shard(0, parts=[2, 4]).parts == (2, 4)


def test_values_that_no_role_has_are_refused():
    with pytest.raises(ValueError, match="gradient"):
        Replica("mean")
    with pytest.raises(ValueError, match=re.escape("'unit' must be >= 1: 0")):
        Shard(0, unit=0)


def test_layouts_are_frozen_and_keep_their_own_copy():
    parameters = {"weight": Shard(0)}
    modules = {"up": ModuleLayout(parameters=parameters)}
    layout = ModelLayout(axis="tp", modules=modules, units=["layers.*"], transparent=["base"])
    parameters["bias"] = Shard(0)
    modules["down"] = ModuleLayout()
    assert layout.modules == {"up": ModuleLayout(parameters={"weight": Shard(0)})}
    assert layout.units == ("layers.*",)
    assert layout.transparent == ("base",)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        layout.axis = "pp"


@pytest.mark.parametrize(
    ("fields", "executes"),
    [
        ({}, False),
        ({"parameters": {"weight": Shard(0)}}, False),
        ({"inputs": {0: Boundary(Replica(), Replica("partial"))}}, True),
        ({"output": Boundary(Replica(), Term())}, True),
        ({"lookup": "weight"}, True),
        ({"once": ["bias"]}, True),
        ({"sharded_dropout": True}, True),
    ],
)
def test_a_module_layout_says_whether_there_is_something_to_install(fields, executes):
    assert ModuleLayout(**fields).executes is executes


def test_a_parameter_is_cut_by_every_axis_that_shards_it():
    layout = ParameterLayout(
        name="w",
        shape=(8, 6, 2),
        dtype="torch.float32",
        itemsize=4,
        trainable=True,
        roles={"tp": Shard(0), "etp": Shard(1), "pp": Replica()},
    )
    assert layout.numel == 96
    assert layout.local_shape({"tp": 4, "etp": 3, "pp": 2}) == (2, 2, 2)
    assert layout.local_shape({"tp": 2}) == (4, 6, 2)
    assert layout.local_shape({}) == (8, 6, 2)


def test_a_scalar_has_one_element():
    scalar = ParameterLayout(name="scale", shape=(), dtype="torch.float32", itemsize=4, trainable=True)
    assert scalar.numel == 1
    assert scalar.local_shape({"tp": 2}) == ()


def test_trainable_names_leave_out_frozen_parameters():
    def facts(name: str, trainable: bool) -> ParameterLayout:
        return ParameterLayout(name=name, shape=(2,), dtype="torch.float32", itemsize=4, trainable=trainable)

    layouts = Layouts(parameters={"a": facts("a", True), "b": facts("b", False), "c": facts("c", True)}, modules={}, units=())
    assert layouts.trainable == ("a", "c")


def test_the_positions_that_hold_a_replica_are_part_of_its_role():
    assert Replica("partial", ranks=[0, 3]).ranks == (0, 3)
    assert Replica().ranks is None
    assert Replica("partial", ranks=(0,)) != Replica("partial") != Replica()
    assert hash(Replica("partial", ranks=[0, 3])) == hash(Replica("partial", ranks=(0, 3)))


def test_holders_are_those_of_its_ranks_and_all_without_any():
    assert num_holders(Replica(ranks=(0, 3)), 4) == 2
    assert num_holders(Replica(ranks=(2,)), 4) == 1
    assert num_holders(Replica("partial"), 4) == num_holders(Shard(0), 4) == num_holders(None, 4) == 4


def test_a_rank_holds_a_parameter_when_it_stands_among_the_holders_of_every_axis():
    roles = {"pp": Replica("partial", ranks=(0, 2)), "ep": Replica(ranks=(1,)), "etp": Shard(0)}
    held = {(pp, ep) for pp in range(3) for ep in range(2) if is_held(roles, {"pp": pp, "ep": ep, "etp": 1, "tp": 5})}
    assert held == {(0, 1), (2, 1)}
    assert is_held(roles, {"pp": 2})
    assert is_held({"pp": Replica("partial"), "tp": Shard(0)}, {"pp": 1, "tp": 1})


@pytest.mark.parametrize(("axis", "expert"), [("ep", True), ("etp", True), ("tp", False), ("pp", False)])
def test_a_parameter_declared_on_an_expert_axis_is_an_experts(axis, expert):
    layout = ParameterLayout("w", (4,), "torch.float32", 4, trainable=True, roles={axis: Replica(), "pp": Replica()})
    assert layout.expert is expert

"""What a declaration becomes once it meets a model, and every way in which it can fail to fit."""

from __future__ import annotations

from typing import Any

import pytest

from mixle_core import (
    Boundary,
    CapabilityError,
    LayoutError,
    ModelLayout,
    ModuleLayout,
    ParallelPlan,
    PluginError,
    Replica,
    Shard,
    Term,
    hookimpl,
    load_plugins,
)
from mixle_core.declarations import declared_layouts, parameter_facts, require_declared, resolve_layouts

from .fakes import Model, Parameter, declare, roles

TP2 = ParallelPlan(tp=2)


def blocks(number: int = 2) -> Model:
    """A model of repeated blocks: two matrices and a bias each, a norm at the end."""
    parameters = {}
    for i in range(number):
        parameters[f"layers.{i}.up.weight"] = Parameter(8, 4)
        parameters[f"layers.{i}.down.weight"] = Parameter(4, 8)
        parameters[f"layers.{i}.down.bias"] = Parameter(4)
    return Model({**parameters, "norm.weight": Parameter(4)})


def tp(**modules: ModuleLayout) -> ModelLayout:
    """Modules by name on tp."""
    return ModelLayout(axis="tp", modules=modules)


def weight(**fields: object) -> ModuleLayout:
    """A module whose weight is cut, with further fields."""
    return ModuleLayout(**{"parameters": {"weight": Shard(0)}, **fields})


def refusal(model: Model, *layouts: ModelLayout, plan: ParallelPlan = TP2, error: type[Exception] = LayoutError) -> str:
    """The text with which `layouts` are refused."""
    with pytest.raises(error) as caught:
        declare(model, plan, *layouts)
    return str(caught.value)


def test_facts_are_read_from_the_parameters():
    tied = Parameter(4, 2, dtype="torch.bfloat16")
    facts = parameter_facts(Model({"wte.weight": tied, "head.weight": tied, "b": Parameter(3, requires_grad=False)}))
    assert list(facts) == ["b", "wte.weight"]
    assert (facts["b"].shape, facts["b"].dtype, facts["b"].itemsize, facts["b"].trainable) == ((3,), "torch.float32", 4, False)
    assert (facts["wte.weight"].itemsize, facts["wte.weight"].aliases) == (2, ("head.weight",))
    assert facts["wte.weight"].trainable is True
    assert facts["wte.weight"].roles == {}


def test_a_pattern_gives_its_role_to_every_parameter_it_covers_and_says_who_declared_it():
    layouts = declare(blocks(), TP2, ModelLayout(axis="tp", modules={"layers.*.up": weight()}))
    assert {name: layout.roles for name, layout in layouts.parameters.items() if layout.roles} == {
        "layers.0.up.weight": {"tp": Shard(0)},
        "layers.1.up.weight": {"tp": Shard(0)},
    }
    assert layouts.parameters["layers.1.up.weight"].declared_by == {"tp": "author"}
    assert layouts.parameters["norm.weight"].declared_by == {}


def test_the_root_module_has_the_empty_name():
    layouts = declare(
        Model({"scale": Parameter(4)}), TP2, ModelLayout(axis="tp", modules={"": ModuleLayout(parameters={"scale": Shard(0)})})
    )
    assert layouts.parameters["scale"].roles == {"tp": Shard(0)}


def test_axes_are_declared_independently_by_several_plugins():
    model = Model({"up.weight": Parameter(8, 4)})
    declared = [("one", roles(up=Shard(0))), ("two", roles("pp", up=Replica("partial")))]
    parameter = resolve_layouts(model, ParallelPlan(tp=2, pp=2), declared).parameters["up.weight"]
    assert parameter.roles == {"tp": Shard(0), "pp": Replica("partial")}
    assert parameter.declared_by == {"tp": "one", "pp": "two"}


def test_names_sequence_and_units_are_logical_and_in_model_order():
    model = Model({"module.b.1.weight": Parameter(2), "module.b.0._orig_mod.weight": Parameter(2), "module.a.weight": Parameter(2)})
    layouts = declare(model, TP2, ModelLayout(axis="tp", units=["a", "b.*"]))
    assert list(layouts.parameters) == ["a.weight", "b.0.weight", "b.1.weight"]
    assert layouts.sequence == ("b.1.weight", "b.0.weight", "a.weight")
    assert layouts.units == ("b.1", "b.0", "a")


def test_a_wrapped_unit_is_one_unit():
    model = Model({"layers.0._checkpoint_wrapped_module.up.weight": Parameter(2)})
    assert declare(model, TP2, ModelLayout(axis="tp", units=["layers.*"])).units == ("layers.0",)


def test_a_transparent_segment_of_one_layout_holds_for_all():
    model = Model({"base.up.weight": Parameter(8, 4)})
    layouts = declare(model, TP2, ModelLayout(axis="tp", transparent=["base"]), roles(up=Shard(0)))
    assert layouts.transparent == ("base",)
    assert layouts.parameters["up.weight"].roles == {"tp": Shard(0)}


def test_boundaries_are_kept_by_axis_and_module_and_plain_roles_are_not():
    boundary = Boundary(Replica(), Replica("partial"))
    layout = ModelLayout(
        axis="tp", modules={"layers.*.up": weight(inputs={0: boundary}), "norm": ModuleLayout(parameters={"weight": Replica()})}
    )
    modules = declare(blocks(), TP2, layout).modules
    assert list(modules) == ["tp"]
    assert list(modules["tp"]) == ["layers.0.up", "layers.1.up"]
    assert modules["tp"]["layers.1.up"].inputs == {0: boundary}


def test_nothing_declared_leaves_the_facts_alone():
    layouts = declare(blocks(), ParallelPlan(dp_shard=2))
    assert (layouts.modules, layouts.units) == ({}, ())
    assert all(not layout.roles for layout in layouts.parameters.values())


@pytest.mark.parametrize("axis", ["dp_shard", "cp", "dp", "TP"])
def test_an_axis_that_is_no_model_axis_is_refused(axis):
    assert refusal(Model({"up.weight": Parameter(8, 4)}), roles(axis, up=Replica())) == (
        f"author declares a layout for axis {axis!r}: expected one of pp, tp, ep, etp; gradients are partial on data axes by themselves"
    )


def test_a_parameter_pattern_that_matches_nothing_names_the_nearest():
    assert refusal(blocks(), ModelLayout(axis="tp", modules={"layers.*.upp": weight()})) == (
        "author declares parameter pattern 'layers.*.upp.weight' for axis 'tp', which matches nothing in the model; "
        "the nearest name is 'layers.*.up.weight'"
    )


def test_a_parameter_name_that_matches_nothing_names_the_nearest():
    layout = ModelLayout(axis="tp", modules={"layers.*.down": ModuleLayout(parameters={"weight": Shard(1), "biass": Replica()})})
    assert refusal(blocks(), layout) == (
        "author declares parameter pattern 'layers.*.down.biass' for axis 'tp', which matches nothing in the model; "
        "the nearest name is 'layers.*.down.bias'"
    )


def test_a_module_pattern_that_matches_nothing_names_the_nearest():
    assert refusal(blocks(), ModelLayout(axis="tp", modules={"layers.*.dwn": ModuleLayout(sharded_dropout=True)})) == (
        "author declares module pattern 'layers.*.dwn' for axis 'tp', which matches nothing in the model; "
        "the nearest name is 'layers.*.down'"
    )


def test_a_unit_pattern_that_matches_nothing_names_the_nearest():
    assert refusal(blocks(), ModelLayout(axis="tp", units=["layer.*"])) == (
        "author declares unit pattern 'layer.*' for axis 'tp', which matches nothing in the model; the nearest name is 'layers.*'"
    )


def test_two_patterns_for_one_parameter_are_refused_with_both():
    model = Model({"up.weight": Parameter(8, 4), "down.weight": Parameter(4, 8)})
    with pytest.raises(LayoutError) as caught:
        resolve_layouts(model, TP2, [("one", roles(up=Shard(0))), ("two", ModelLayout(axis="tp", modules={"**": weight()}))])
    assert str(caught.value) == (
        "exactly one pattern declares a parameter on axis 'tp'; several for 1 of 2: "
        "up.weight: claimed by one (up.weight) and two (**.weight); "
        "way out: make the patterns disjoint, or leave one plugin out of MIXLE_PLUGINS"
    )


def test_two_patterns_with_equal_roles_are_refused_too():
    layout = ModelLayout(axis="tp", modules={"up": weight(), "{up,down}": weight()})
    text = refusal(Model({"up.weight": Parameter(8, 4), "down.weight": Parameter(8, 4)}), layout)
    assert "up.weight: claimed by author (up.weight) and author ({up,down}.weight)" in text


def test_tied_parameters_with_different_roles_are_refused_with_both():
    tied = Parameter(8, 4)
    model = Model({"wte.weight": tied, "head.weight": tied})
    with pytest.raises(LayoutError) as caught:
        resolve_layouts(model, TP2, [("one", roles(wte=Shard(0))), ("two", roles(head=Replica()))])
    lines = str(caught.value).splitlines()
    assert lines[0] == "one tied parameter was declared with 2 roles on 'tp'"
    assert sorted(lines[1:-1]) == ["  head.weight: Replica(complete) by two", "  wte.weight: Shard(0) by one"]
    assert lines[-1] == "way out: declare equal roles"


def test_tied_parameters_may_be_declared_under_any_of_their_names():
    tied = Parameter(8, 4)
    model = Model({"wte.weight": tied, "head.weight": tied})
    for layout in (roles(wte=Shard(0), head=Shard(0)), roles(head=Shard(0)), roles(wte=Shard(0))):
        assert declare(model, TP2, layout).parameters["wte.weight"].roles == {"tp": Shard(0)}


def test_units_that_the_axis_does_not_divide_name_parameter_and_choices():
    layout = roles(q=Shard(0, unit=4, unit_name="head"))
    assert refusal(Model({"q.weight": Parameter(24, 8)}), layout, plan=ParallelPlan(tp=4), error=CapabilityError) == (
        "q.weight: dim 0 has 6 heads, which tp=4 does not divide (declared by author); choose tp from 1, 2, 3, 6"
    )


def test_elements_are_units_where_none_are_named():
    assert refusal(Model({"up.weight": Parameter(4, 9)}), roles(up=Shard(1)), error=CapabilityError) == (
        "up.weight: dim 1 has 9 units, which tp=2 does not divide (declared by author); choose tp from 1, 3, 9"
    )


def test_each_part_of_a_fused_matrix_has_to_divide():
    layout = roles(qkv=Shard(0, unit=2, parts=(8, 2, 2), unit_name="head"))
    assert refusal(Model({"qkv.weight": Parameter(12, 4)}), layout, error=CapabilityError) == (
        "qkv.weight: dim 0 has 1 heads, which tp=2 does not divide (declared by author); choose tp from 1"
    )
    assert declare(Model({"qkv.weight": Parameter(12, 4)}), ParallelPlan(dp_shard=2), layout).parameters["qkv.weight"].numel == 48


def test_parts_that_do_not_add_up_are_refused():
    assert refusal(Model({"qkv.weight": Parameter(12, 4)}), roles(qkv=Shard(0, parts=(8, 2)))) == (
        "author declares qkv.weight with shape [12, 4] as Shard(0, parts=[8, 2]) on 'tp': parts add up to 10, expected 12"
    )


def test_a_part_that_cuts_a_unit_is_refused():
    assert refusal(Model({"qkv.weight": Parameter(12, 4)}), roles(qkv=Shard(0, unit=4, parts=(6, 6)))) == (
        "author declares qkv.weight with shape [12, 4] as Shard(0, unit=4, parts=[6, 6]) on 'tp': "
        "6 elements are not a whole number of units of 4"
    )


@pytest.mark.parametrize("dim", [2, -1])
def test_a_dimension_that_does_not_exist_is_refused(dim):
    assert refusal(Model({"up.weight": Parameter(8, 4)}), roles(up=Shard(dim))) == (
        f"author declares up.weight with shape [8, 4] as Shard({dim}) on 'tp': dim {dim} does not exist; expected 0 to 1"
    )


def test_an_activation_outside_a_module_is_never_a_term():
    text = "author (up): an activation outside a module is a Replica or a Shard, never a Term"
    model = Model({"up.weight": Parameter(8, 4)})
    assert refusal(model, tp(up=weight(output=Boundary(Term(), Replica())))) == text
    assert refusal(model, tp(up=weight(inputs={"hidden": Boundary(Term(), Shard(0))}))) == text


TERM = Boundary(Replica(), Term())


def down(bias: Replica | Shard, **fields: object) -> ModelLayout:
    """A row-parallel module with a bias."""
    return tp(down=ModuleLayout(parameters={"weight": Shard(1), "bias": bias}, **fields))


DOWN = Model({"down.weight": Parameter(4, 8), "down.bias": Parameter(4)})


@pytest.mark.parametrize("gradient", ["complete", "partial"])
def test_a_bias_added_by_every_rank_to_a_term_is_refused(gradient):
    assert refusal(DOWN, down(Replica(gradient), output=TERM)) == (
        "author (down): the output is a term of a sum, so bias would be added once by every rank; "
        "name it in once=(...) with the role Replica('partial'), or shard it"
    )


@pytest.mark.parametrize("bias", [Replica("complete"), Shard(0)])
def test_a_bias_added_once_has_to_be_partial(bias):
    assert refusal(DOWN, down(bias, output=TERM, once=["bias"])) == (
        "author (down): bias in once=(...) must be declared Replica('partial'): one rank has all of its gradient"
    )


def test_a_bias_added_once_needs_an_output_that_is_a_term():
    text = "author (down): once=['bias'] needs an output that is a Term inside"
    assert refusal(DOWN, down(Replica("partial"), once=["bias"])) == text
    assert refusal(DOWN, down(Replica("partial"), once=["bias"], output=Boundary(Replica(), Shard(0)))) == text


def test_a_partial_bias_added_once_is_accepted():
    modules = declare(DOWN, TP2, down(Replica("partial"), output=TERM, once=["bias"])).modules
    assert modules["tp"]["down"].once == ("bias",)


def test_boundaries_from_two_patterns_on_one_module_are_refused():
    boundary = Boundary(Replica(), Replica("partial"))
    layout = ModelLayout(axis="tp", modules={"up": weight(inputs={0: boundary}), "u*": ModuleLayout(output=boundary)})
    assert refusal(Model({"up.weight": Parameter(8, 4)}), layout) == (
        "one pattern lays boundaries on a module on axis 'tp'; several for 1 of 1: "
        "up: claimed by author (up) and author (u*); "
        "way out: merge the two declarations into one pattern"
    )


def test_undeclared_parameters_are_refused_with_lines_to_paste():
    layouts = declare(blocks(), TP2, ModelLayout(axis="tp", modules={"layers.*.up": weight()}))
    with pytest.raises(LayoutError) as caught:
        require_declared(layouts, "tp", TP2)
    hint = '  # or Replica("partial"), or Shard(dim)'
    *lines, way_out = str(caught.value).splitlines()
    assert lines == [
        "5 of 7 parameters are undeclared on axis 'tp' of size 2",
        '  "layers.*.down": ModuleLayout(parameters={"bias": Replica("complete"), "weight": Replica("complete")}),' + hint,
        '  "norm": ModuleLayout(parameters={"weight": Replica("complete")}),' + hint,
    ]
    assert way_out.startswith('way out: put these lines into a ModelLayout(axis="tp", modules={...}) with the right roles, or install ')


def test_the_lines_to_paste_declare_everything():
    model = Model({**blocks().parameters, "scale": Parameter(2), "experts.0": Parameter(2), "experts.1": Parameter(2)})
    with pytest.raises(LayoutError) as caught:
        require_declared(declare(model, TP2), "tp", TP2)
    lines = str(caught.value).splitlines()[1:-1]
    modules = eval("{" + "\n".join(lines) + "\n}", {"ModuleLayout": ModuleLayout, "Replica": Replica})
    layouts = declare(model, TP2, ModelLayout(axis="tp", modules=modules))
    require_declared(layouts, "tp", TP2)
    assert {layout.roles["tp"] for layout in layouts.parameters.values()} == {Replica("complete")}


def test_frozen_parameters_have_to_be_declared_too():
    model = Model({"up.weight": Parameter(8, 4), "base.weight": Parameter(8, 4, requires_grad=False)})
    with pytest.raises(LayoutError, match=r"^1 of 2 parameters are undeclared on axis 'tp' of size 2: \"base\": ModuleLayout"):
        require_declared(declare(model, TP2, roles(up=Shard(0))), "tp", TP2)


def test_a_role_on_another_axis_is_no_declaration():
    layouts = declare(Model({"up.weight": Parameter(8, 4)}), ParallelPlan(pp=2, tp=2), roles("pp", up=Replica()))
    require_declared(layouts, "pp", ParallelPlan(pp=2, tp=2))
    with pytest.raises(LayoutError, match="1 of 1 parameters are undeclared on axis 'tp'"):
        require_declared(layouts, "tp", ParallelPlan(pp=2, tp=2))


@pytest.mark.parametrize("ranks", [(), (0, 4), (-1, 0), (2, 1), (1, 1)], ids=["none", "outside", "negative", "unordered", "doubled"])
def test_holders_are_positions_on_the_axis_in_order(ranks):
    plan = ParallelPlan(pp=4)
    model = Model({"embed.weight": Parameter(8, 4)})
    assert refusal(model, roles("pp", embed=Replica("partial", ranks=ranks)), plan=plan) == (
        f"author declares embed.weight with shape [8, 4] as Replica(partial, ranks={list(ranks)}) on 'pp': "
        "expected ranks from 0 to 3, in order"
    )
    for right in ((0, 3), (2,), (0, 1, 2, 3)):
        declared = declare(model, plan, roles("pp", embed=Replica("partial", ranks=right)))
        assert declared.parameters["embed.weight"].roles == {"pp": Replica("partial", ranks=right)}


MOE = Model({"router.weight": Parameter(4, 4), "expert.weight": Parameter(8, 4)})
MOE_PLAN = ParallelPlan(pp=2, dp_shard=2, tp=2, ep=2)


def test_experts_are_asked_about_the_expert_axes_only_and_the_others_about_tp_only():
    experts = declare(MOE, MOE_PLAN, roles("ep", expert=Shard(0)))
    require_declared(experts, "ep", MOE_PLAN)
    for axis, asked in (("tp", "router"), ("etp", "expert")):
        with pytest.raises(LayoutError, match=f"^1 of 2 parameters are undeclared on axis '{axis}' of size 2: \"{asked}\": ModuleLayout"):
            require_declared(experts, axis, MOE_PLAN)
    both = declare(MOE, MOE_PLAN, roles("ep", expert=Shard(0)), roles("etp", expert=Shard(1)), roles("tp", router=Replica()))
    for axis in ("ep", "tp", "etp"):
        require_declared(both, axis, MOE_PLAN)


def test_experts_are_asked_about_pp_too():
    layouts = declare(MOE, MOE_PLAN, roles("ep", expert=Shard(0)), roles("pp", router=Replica(ranks=(0,))))
    with pytest.raises(LayoutError, match="1 of 2 parameters are undeclared on axis 'pp'"):
        require_declared(layouts, "pp", MOE_PLAN)


def test_a_parameter_declared_in_both_views_is_refused():
    assert "ep" in refusal(MOE, roles("ep", expert=Shard(0)), roles("tp", expert=Shard(1)), plan=MOE_PLAN)


class Declares:
    """Declares `layout` once `needed` has a role, and notes what it was told."""

    def __init__(self, layout: Any, needed: str | None = None) -> None:
        self.layout = layout
        self.needed = needed
        self.told: list[set[str]] = []

    @hookimpl
    def declare_layout(self, declared: Any) -> Any:
        names = {name for name, by_axis in declared.items() if by_axis}
        self.told.append(names)
        return self.layout if self.needed is None or self.needed in names else None


LINEARS = Model({"base.weight": Parameter(8, 4), "adapter.weight": Parameter(8, 4), "other.weight": Parameter(8, 4)})


def test_an_adapter_waits_for_its_base_layer_without_any_order(site):
    adapter = Declares(roles(adapter=Replica("partial")), needed="base.weight")
    base = Declares(roles(base=Shard(0)))
    loaded = load_plugins(extra={"adapter": adapter, "base": base})
    assert declared_layouts(loaded, LINEARS, TP2) == [("base (passed in code)", base.layout), ("adapter (passed in code)", adapter.layout)]
    assert adapter.told == [set(), {"base.weight"}]
    assert base.told == [set()]


def test_a_plugin_that_never_answers_is_asked_after_every_round_that_declared_something(site):
    never = Declares(roles(other=Replica()), needed="nothing")
    chain = {"a": never, "b": Declares(roles(adapter=Replica()), needed="base.weight"), "c": Declares(roles(base=Shard(0)))}
    assert len(declared_layouts(load_plugins(extra=chain), LINEARS, TP2)) == 2
    assert never.told == [set(), {"base.weight"}, {"base.weight", "adapter.weight"}]


def test_roles_declared_in_one_round_are_told_in_the_next(site):
    class Notes:
        seen: Any = None

        @hookimpl
        def declare_layout(self, model: Any, plan: Any, declared: Any) -> None:
            self.seen = (model, plan, dict(declared))

    notes = Notes()
    declared_layouts(load_plugins(extra={"base": Declares(roles(base=Shard(0))), "notes": notes}), LINEARS, TP2)
    assert notes.seen == (LINEARS, TP2, {"adapter.weight": {}, "base.weight": {"tp": Shard(0)}, "other.weight": {}})


def test_a_plugin_may_declare_several_axes_at_once(site):
    both = (roles(base=Shard(0)), roles("pp", base=Replica("partial")))
    loaded = load_plugins(extra={"alpha": Declares(both)})
    assert declared_layouts(loaded, LINEARS, ParallelPlan(tp=2, pp=2)) == [("alpha (passed in code)", layout) for layout in both]


def test_a_faulty_declaration_names_the_plugin_with_its_label(site):
    site.install(
        "alpha",
        """
        from mixle_core import ModelLayout, ModuleLayout, Shard, hookimpl

        @hookimpl
        def declare_layout():
            return ModelLayout(axis="tp", modules={"bass": ModuleLayout(parameters={"weight": Shard(0)})})
        """,
    )
    with pytest.raises(
        LayoutError, match=r"^alpha \(mixle-alpha 1.0\) declares parameter pattern 'bass.weight' for axis 'tp', which matches nothing"
    ):
        declared_layouts(load_plugins(), LINEARS, TP2)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"base": Shard(0)}, "dict"),
        ([roles(base=Shard(0))], "list"),
        (True, "bool"),
        ((roles(base=Shard(0)), ModuleLayout()), "ModuleLayout"),
        (ModelLayout, "type"),
    ],
)
def test_an_answer_of_another_type_is_refused_with_the_type(site, answer, kind):
    with pytest.raises(PluginError) as caught:
        declared_layouts(load_plugins(extra={"alpha": Declares(answer)}), LINEARS, TP2)
    assert str(caught.value) == (
        f"alpha (passed in code): declare_layout returned {kind}, expected ModelLayout or None; "
        "way out: correct the plugin, or leave it out of MIXLE_PLUGINS"
    )

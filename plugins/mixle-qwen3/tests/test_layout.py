"""Every parameter of every Qwen3 model has exactly the role that its computation gives it; what tp cannot cut is refused by name."""

from __future__ import annotations

import functools

import pytest
import torch
from mixle_qwen3.build import SIZES
from mixle_qwen3.plugin import declare_layout
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

from mixle_core import Boundary, CapabilityError, LayoutError, ModelLayout, ModuleLayout, ParallelPlan, Replica, Shard, Term
from mixle_core.declarations import require_declared, resolve_layouts
from mixle_core.layout import generalise

WHOLE, PARTIAL, SEQUENCE = Replica("complete"), Replica("partial"), Shard(1)


@functools.cache
def on_meta(size, kind=Qwen3ForCausalLM, **changes):
    with torch.device("meta"):
        return kind(Qwen3Config(**{**SIZES[size], **changes}))


def declared(model, plan, *further):
    return resolve_layouts(model, plan, [("qwen3", declare_layout(model=model, plan=plan, declared={})), *further])


def roles(model, plan):
    """Pattern -> role on tp; all layers say the same."""
    found = {}
    for name, layout in declared(model, plan).parameters.items():
        assert found.setdefault(generalise(name), layout.roles["tp"]) == layout.roles["tp"], name
    return found


def expected(norm, base="model.", *, head=True, bias=False):
    """Roles of tiny: heads of 16; `norm` is the role of the norms between blocks."""
    layer, heads = f"{base}layers.*", Shard(0, unit=16)
    found = {
        f"{base}embed_tokens.weight": Shard(0),
        f"{layer}.input_layernorm.weight": norm,
        f"{layer}.post_attention_layernorm.weight": norm,
        f"{layer}.self_attn.q_proj.weight": heads,
        f"{layer}.self_attn.k_proj.weight": heads,
        f"{layer}.self_attn.v_proj.weight": heads,
        f"{layer}.self_attn.q_norm.weight": PARTIAL,
        f"{layer}.self_attn.k_norm.weight": PARTIAL,
        f"{layer}.self_attn.o_proj.weight": Shard(1, unit=16),
        f"{layer}.mlp.gate_proj.weight": Shard(0),
        f"{layer}.mlp.up_proj.weight": Shard(0),
        f"{layer}.mlp.down_proj.weight": Shard(1),
        f"{base}norm.weight": norm,
    }
    if head:
        found["lm_head.weight"] = Shard(0)
    if bias:
        found |= {f"{layer}.self_attn.{name}_proj.bias": heads for name in ("q", "k", "v")}
        found[f"{layer}.self_attn.o_proj.bias"] = PARTIAL
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "base", "head"), [(Qwen3ForCausalLM, "model.", True), (Qwen3Model, "", False)])
def test_roles_are_exactly_these(kind, base, head, bias, sequence_parallel):
    plan = ParallelPlan(tp=2, sequence_parallel=sequence_parallel)
    model = on_meta("tiny", kind, attention_bias=bias)
    assert roles(model, plan) == expected(PARTIAL if sequence_parallel else WHOLE, base, head=head, bias=bias)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("size", SIZES)
def test_every_parameter_of_every_size_is_declared(size, tp):
    model, plan = on_meta(size), ParallelPlan(tp=tp)
    if SIZES[size]["num_key_value_heads"] % tp:
        with pytest.raises(CapabilityError, match=rf"{tp}; choose tp so that it divides"):
            declared(model, plan)
        return
    layouts = declared(model, plan)
    require_declared(layouts, "tp", plan)
    assert len(layouts.parameters) == len(list(model.parameters()))
    assert layouts.units == tuple(f"model.layers.{i}" for i in range(SIZES[size]["num_hidden_layers"]))


@pytest.mark.parametrize("size", [size for size, settings in SIZES.items() if settings["tie_word_embeddings"]])
def test_a_tied_head_is_one_parameter_with_one_role(size):
    parameters = declared(on_meta(size), ParallelPlan(tp=2)).parameters
    assert "lm_head.weight" not in parameters
    assert parameters["model.embed_tokens.weight"].aliases == ("lm_head.weight",)
    assert parameters["model.embed_tokens.weight"].roles == {"tp": Shard(0)}


def modules(model, **plan):
    return declared(model, ParallelPlan(tp=2, **plan)).modules["tp"]


@pytest.mark.parametrize("bias", [False, True])
def test_one_boundary_enters_and_one_leaves_each_attention_and_mlp(bias):
    found = modules(on_meta("tiny", attention_bias=bias))
    enter, leave = Boundary(outside=WHOLE, inside=PARTIAL), Boundary(outside=WHOLE, inside=Term())
    for layer in ("model.layers.0", "model.layers.1"):
        assert found[f"{layer}.self_attn"].inputs == {"hidden_states": enter} and found[f"{layer}.self_attn"].output is None
        assert found[f"{layer}.mlp"].inputs == {0: enter} and found[f"{layer}.mlp"].output is None
        assert found[f"{layer}.self_attn.o_proj"].output == found[f"{layer}.mlp.down_proj"].output == leave
        assert found[f"{layer}.self_attn.o_proj"].once == (("bias",) if bias else ())
        assert layer not in found
    assert found["model.embed_tokens"].lookup == "weight" and found["model.embed_tokens"].output == leave
    assert found["lm_head"].inputs == {0: enter} and found["lm_head"].output == Boundary(outside=WHOLE, inside=Shard(-1))


def test_sequence_parallelism_cuts_the_tokens_at_the_first_layer_and_gathers_them_where_they_meet_weights():
    found = modules(on_meta("tiny"), sequence_parallel=True)
    assert found["model.layers.0"].inputs == {0: Boundary(outside=WHOLE, inside=SEQUENCE)}
    assert "model.layers.1" not in found and "model.norm" not in found
    for name in ("model.layers.0.self_attn", "model.layers.1.mlp", "lm_head"):
        assert list(found[name].inputs.values()) == [Boundary(outside=SEQUENCE, inside=PARTIAL)]
    assert found["model.layers.1.mlp.down_proj"].output == Boundary(outside=SEQUENCE, inside=Term())


def test_a_bare_model_gathers_its_tokens_behind_the_last_norm():
    assert modules(on_meta("tiny", Qwen3Model), sequence_parallel=True)["norm"].output == Boundary(outside=WHOLE, inside=SEQUENCE)
    assert "norm" not in modules(on_meta("tiny", Qwen3Model))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_dropout_is_drawn_for_each_rank_s_heads(dropout):
    assert modules(on_meta("tiny", attention_dropout=dropout))["model.layers.0.self_attn"].sharded_dropout is (dropout > 0)


@pytest.mark.parametrize(
    ("changes", "tp", "said"),
    [
        ({}, 4, "num_key_value_heads=2 is not divisible by tp=4"),
        ({"num_attention_heads": 6}, 4, "num_attention_heads=6 is not divisible by tp=4"),
        ({"intermediate_size": 129}, 2, "intermediate_size=129 is not divisible by tp=2"),
        ({"vocab_size": 255}, 2, "vocab_size=255 is not divisible by tp=2"),
    ],
)
def test_what_tp_does_not_divide_is_refused_by_name(changes, tp, said):
    with pytest.raises(CapabilityError, match=f"^qwen3: {said}; choose tp"):
        declared(on_meta("tiny", **changes), ParallelPlan(tp=tp))


def test_another_head_is_left_to_who_knows_it():
    model, plan = on_meta("tiny", Qwen3ForSequenceClassification, num_labels=3), ParallelPlan(tp=2, sequence_parallel=True)
    with pytest.raises(LayoutError, match=r'^1 of 25 parameters are undeclared on axis \'tp\' of size 2: "score":'):
        require_declared(declared(model, plan), "tp", plan)
    score = ModelLayout(axis="tp", modules={"score": ModuleLayout(parameters={"weight": WHOLE})})
    require_declared(declared(model, plan, ("score", score)), "tp", plan)
    assert declared(model, plan).modules["tp"]["model.norm"].output == Boundary(outside=WHOLE, inside=SEQUENCE)

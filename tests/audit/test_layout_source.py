"""Folding of modules into patterns, and the source that a layout becomes."""

from __future__ import annotations

import types

import torch

from mixle_core import Boundary, ModelLayout, ModuleLayout, ParallelPlan, Replica, Shard, Term
from mixle_core.audit._upstream import without_gradient_hooks
from mixle_core.audit.infer_slices import Cut, locate
from mixle_core.audit.layout_source import fold, source

WHOLE, SHARED = Replica("complete"), Replica("partial")


def patterns(layouts, names):
    return [entry.pattern for entry in fold(layouts, names)]


def copies(*names):
    return {name: ModuleLayout(parameters={"weight": WHOLE}) for name in names}


def test_layers_that_are_alike_are_one_pattern_and_the_others_are_not():
    names = ["", "layers", *(f"layers.{n}" for n in range(4)), *(f"layers.{n}.mlp" for n in range(4)), "norm"]
    assert patterns(copies(*names[6:10]), names) == ["layers.*.mlp"]
    assert patterns(copies("layers.1.mlp", "layers.3.mlp"), names) == ["layers.{1,3}.mlp"]
    assert patterns(copies("layers.2.mlp"), names) == ["layers.2.mlp"]
    mixed = {**copies("layers.0.mlp", "layers.2.mlp"), "layers.1.mlp": ModuleLayout(parameters={"weight": SHARED})}
    assert patterns(mixed, names) == ["layers.{0,2}.mlp", "layers.1.mlp"]


def test_a_star_takes_no_module_that_is_not_meant():
    names = ["", "0", "1", "norm"]
    assert patterns(copies("0", "1"), names) == ["{0,1}"]


def test_layers_that_no_product_of_indices_describes_stand_one_by_one():
    names = [f"a.{n}.b.{m}" for n in range(2) for m in range(2)]
    assert patterns(copies("a.0.b.0", "a.1.b.1"), names) == ["a.0.b.0", "a.1.b.1"]


def test_siblings_share_their_ending():
    names = ["x.q_proj", "x.k_proj", "x.o_proj", "x.input_layernorm", "x.post_attention_layernorm", "x.up", "x.down"]
    made = {**copies("x.q_proj", "x.k_proj"), "x.o_proj": ModuleLayout(parameters={"weight": Shard(1)})}
    assert patterns(made, names) == ["x.{q,k}_proj", "x.o_proj"]
    assert patterns(copies(*names[3:5]), names) == ["x.{input,post_attention}_layernorm"]
    assert patterns(copies("x.up", "x.down"), names) == ["x.{up,down}"]


def test_parameters_of_once_keep_their_own_names():
    leave = Boundary(outside=WHOLE, inside=Term())
    layout = ModuleLayout(parameters={"bias": SHARED, "scale": SHARED, "shift": SHARED}, output=leave, once=("bias",))
    (entry,) = fold({"down": layout}, ["down"])
    assert dict(entry.layout.parameters) == {"bias": SHARED, "{scale,shift}": SHARED}


def test_every_value_of_a_layout_survives_its_source():
    modules = {
        "embed": ModuleLayout(parameters={"weight": Shard(0)}, lookup="weight", output=Boundary(outside=Shard(1), inside=Term())),
        "a": ModuleLayout(parameters={"x": Shard(0, unit=4, parts=(8, 16))}, inputs={0: Boundary(outside=WHOLE, inside=SHARED)}),
        "b": ModuleLayout(parameters={"x": Replica("partial", ranks=(0, 2))}, sharded_dropout=True),
        "c": ModuleLayout(
            parameters={f"a_rather_long_name_of_parameter_number_{n}": Shard(n) for n in range(3)},
            inputs={"hidden_states": Boundary(outside=WHOLE, inside=Shard(-1)), 2: Boundary(outside=Shard(1), inside=SHARED)},
            output=Boundary(outside=WHOLE, inside=Term()),
            once=("one", "two"),
        ),
    }
    layout = ModelLayout(axis="tp", modules=modules, units=("layers.*", "more.*"))
    text = source(layout, model="Thing", measured="by hand", notes={"a": "a note " * 30}, sequence_parallel=False)
    assert max(map(len, text.splitlines())) <= 100
    module = types.ModuleType("written")
    exec(compile(text, "written.py", "exec"), module.__dict__)
    assert module.declare_layout(type("Thing", (), {})(), ParallelPlan(tp=2)) == layout


def test_slices_are_found_by_their_rows():
    whole = torch.arange(48.0).reshape(12, 4)
    assert locate(whole.chunk(2), whole) == Cut(0, (None,))
    assert locate(whole.chunk(2, 1), whole) == Cut(1, (None,))
    q, k, v = whole.split([8, 2, 2])
    fused = [torch.cat([part.chunk(2)[rank] for part in (q, k, v)]) for rank in range(2)]
    assert locate(fused, whole) == Cut(0, ((8, 2, 2),))
    assert "neither a slice nor parts describe" in locate([whole[::2], whole[1::2]][::-1], whole)
    assert locate([whole[:6], whole[6:7]], whole).startswith("the ranks hold shapes [6, 4] and [1, 4] of [12, 4]")
    assert locate([whole.T, whole.T], whole) == "the ranks hold shape [4, 12] of [12, 4]: no slice along one dim"


def test_hooks_are_put_aside_and_back():
    parameter = torch.ones(2, requires_grad=True)
    parameter.register_hook(lambda gradient: 10 * gradient)
    with without_gradient_hooks([parameter]):
        (without,) = torch.autograd.grad(parameter.sum(), parameter)
    (again,) = torch.autograd.grad(parameter.sum(), parameter)
    assert (without.tolist(), again.tolist()) == ([1.0, 1.0], [10.0, 10.0])

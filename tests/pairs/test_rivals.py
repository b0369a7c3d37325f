"""Two installed plugins that both could: the error names both and the way out, `backend=` settles it, and no order ever does."""

from __future__ import annotations

import itertools

import pytest

from .environments import CORE, NATIVE

DDP = "torch-ddp (mixle-torch-ddp 0.1.0)"
FSDP2 = "torch-fsdp2 (mixle-torch-fsdp2 0.1.0)"
TP = "dtensor-tp (mixle-dtensor-tp 0.1.0)"
QWEN3 = "qwen3 (mixle-qwen3 0.1.0)"
AHEAD, YONDER, TWIN = "ahead (mixle-ahead 1.0)", "yonder (mixle-yonder 3.0)", "twin (mixle-twin 2.0)"
AGAIN, TAIL = "again (mixle-again 0.3)", "tail (mixle-tail 0.4)"
EARLY, LATE = "fill-early (mixle-fill-early 1.0)", "fill-late (mixle-fill-late 1.5)"
THIRD = ("again", "ahead==1.0", "fill-early", "fill-late", "tail", "twin", "yonder")
DP2, FSDP, TP2 = {"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}
WAY_OUT = "way out: choose with backend=..., or leave one of them out of MIXLE_PLUGINS"


@pytest.fixture(scope="module")
def crowd(environment):
    """All native plugins and all rivals in one environment; tests say who is enabled."""
    return environment(*NATIVE, *THIRD)


def ask(environment, plan, *names, kind="explain", **question):
    """Enable the named plugins beside the native ones."""
    return environment.ask(kind, plan=plan, allow=",".join((*NATIVE, *names)), **question)


def refused(answer, kind):
    assert (answer.get("error"), answer.get("value")) == (kind, None), answer
    return answer["text"]


def several_owners(*claimants):
    """The first lines, and the last, of two claims on every parameter."""
    return [
        "each trainable parameter needs exactly one owner; several for 25 of 25",
        f"  lm_head.weight: claimed by {' and '.join(claimants)}",
        f"  model.embed_tokens.weight: claimed by {' and '.join(claimants)}",
        f"  model.layers.0.input_layernorm.weight: claimed by {' and '.join(claimants)}",
    ]


@pytest.mark.parametrize(
    ("plan", "rival", "claimants"),
    [
        (DP2, "ahead", (AHEAD, DDP)),
        (DP2, "yonder", (DDP, YONDER)),
        (DP2, "twin", (DDP, TWIN)),
        (FSDP, "ahead", (AHEAD, FSDP2)),
        (FSDP, "twin", (FSDP2, TWIN)),
    ],
    ids=["ddp-ahead", "ddp-yonder", "ddp-twin", "fsdp2-ahead", "fsdp2-twin"],
)
def test_two_claims_on_one_parameter_name_both_and_the_way_out(crowd, plan, rival, claimants):
    lines = refused(ask(crowd, plan, rival), "OwnershipError").splitlines()
    assert lines[:4] == several_owners(*claimants)
    assert lines[-2:] == ["  ... and 13 more", WAY_OUT]


def test_three_claims_name_all_three(crowd):
    lines = refused(ask(crowd, DP2, "ahead", "yonder"), "OwnershipError").splitlines()
    assert lines[1] == f"  lm_head.weight: claimed by {AHEAD} and {DDP} and {YONDER}"


LABELS = {"torch-ddp": "torch_native", "ahead": "ahead", "yonder": "yonder"}


@pytest.mark.parametrize("order", [*itertools.permutations(LABELS, 2)], ids="-before-".join)
def test_the_preferred_backend_owns_whatever_its_plugin_is_called(crowd, order):
    found = ask(crowd, DP2, "ahead", "yonder", backend=[LABELS[name] for name in order])["value"]
    assert found["owners"] == [order[0]]
    assert {backend for _, backend, _, _ in found["rows"].values()} == {LABELS[order[0]]}


@pytest.mark.parametrize("name", LABELS)
def test_one_backend_settles_it(crowd, name):
    assert ask(crowd, DP2, "ahead", "yonder", backend=LABELS[name])["value"]["owners"] == [name]


def test_a_preference_for_a_backend_that_nobody_has_falls_to_the_next(crowd):
    assert ask(crowd, DP2, "ahead", backend=["megatron", "torch_native"])["value"]["owners"] == ["torch-ddp"]
    assert refused(ask(crowd, DP2, "ahead", backend="megatron"), "CapabilityError") == (
        f"backend megatron: no plugin of it owns dp_replicate=2: {FSDP2} declined: dp_shard=1 leaves nothing to shard; "
        "set dp_shard above 1; way out: backends that claim here: ahead, torch_native"
    )


def test_two_plugins_of_one_backend_are_not_settled_by_naming_it(crowd):
    lines = refused(ask(crowd, DP2, "twin", backend="torch_native"), "OwnershipError").splitlines()
    assert lines[:4] == several_owners(DDP, TWIN)
    assert lines[-1] == WAY_OUT


@pytest.mark.parametrize(("left_out", "owner"), [("twin", "torch-ddp"), ("torch-ddp", "twin")])
def test_the_allow_list_settles_two_plugins_of_one_backend(crowd, left_out, owner):
    names = {*NATIVE, "twin"} - {left_out}
    assert crowd.ask("explain", plan=DP2, allow=",".join(sorted(names)))["value"]["owners"] == [owner]
    assert crowd.ask("explain", plan=DP2, plugins=sorted(names))["value"]["owners"] == [owner]


@pytest.mark.parametrize(
    ("rival", "claimants"), [("ahead", (AHEAD, TP)), ("yonder", (TP, YONDER)), ("twin", (TP, TWIN))], ids=["ahead", "yonder", "twin"]
)
def test_two_executors_of_one_axis_name_both_and_the_way_out(crowd, rival, claimants):
    assert refused(ask(crowd, TP2, rival), "OwnershipError") == (
        "each axis that splits the forward needs exactly one executor (plan: tp=2); several for 1 of 1: "
        f"tp: claimed by {' and '.join(claimants)}; {WAY_OUT}"
    )


@pytest.mark.parametrize(
    ("backend", "name"), [("torch_native", "dtensor-tp"), ("ahead", "ahead"), ("yonder", "yonder")], ids=["native", "ahead", "yonder"]
)
def test_one_backend_settles_the_executor(crowd, backend, name):
    found = ask(crowd, TP2, "ahead", "yonder", backend=backend)["value"]
    assert (found["executors"], found["owners"]) == ({"tp": name}, sorted((name, "local")))


AXIS_LABELS = {"dtensor-tp": "torch_native", "ahead": "ahead", "yonder": "yonder"}


@pytest.mark.parametrize("order", [*itertools.permutations(AXIS_LABELS, 2)], ids="-before-".join)
def test_the_preferred_backend_executes_the_axis(crowd, order):
    answer = ask(crowd, TP2, "ahead", "yonder", backend=[AXIS_LABELS[name] for name in order])
    assert "value" in answer, answer["text"]
    assert (answer["value"]["executors"], answer["value"]["owners"]) == ({"tp": order[0]}, sorted((order[0], "local")))


@pytest.mark.parametrize(("rival", "label", "first"), [("again", AGAIN, True), ("tail", TAIL, False)], ids=["again", "tail"])
def test_two_layouts_of_one_parameter_name_both_and_the_way_out(crowd, rival, label, first):
    claims = [f"{label} (model.norm.weight)", f"{QWEN3} (model.norm.weight)"]
    assert refused(ask(crowd, TP2, rival), "LayoutError") == (
        "exactly one pattern declares a parameter on axis 'tp'; several for 1 of 25: "
        f"model.norm.weight: claimed by {' and '.join(claims if first else claims[::-1])}; "
        "way out: make the patterns disjoint, or leave one plugin out of MIXLE_PLUGINS"
    )
    assert ask(crowd, TP2)["value"]["executors"] == {"tp": "dtensor-tp"}


def test_two_plugins_that_fill_one_parameter_name_both_and_the_way_out(crowd):
    assert refused(ask(crowd, {}, "fill-early", "fill-late", kind="attach"), "OwnershipError") == (
        f"one plugin fills a parameter; several for 1 of 1: model.norm.weight: claimed by {EARLY} and {LATE}; "
        "way out: leave one of them out of MIXLE_PLUGINS"
    )
    for name, value in (("fill-early", 2.0), ("fill-late", 3.0)):
        assert ask(crowd, {}, name, kind="attach")["value"]["filled"] == value
    assert ask(crowd, {}, kind="attach")["value"]["filled"] == 1.0


def test_the_order_of_installation_decides_nothing(fresh):
    answers = []
    for order in (("mixle-ahead==1.0", "mixle-torch-ddp"), ("mixle-torch-ddp", "mixle-ahead==1.0")):
        environment = fresh().install(CORE)
        for name in order:
            environment.install(name)
        answers.append(
            [
                refused(environment.ask("explain", plan=DP2), "OwnershipError"),
                *(environment.ask("explain", plan=DP2, backend=b)["value"] for b in (["ahead", "torch_native"], ["torch_native", "ahead"])),
            ]
        )
    assert answers[0] == answers[1]
    assert [found["owners"] for found in answers[0][1:]] == [["ahead"], ["torch-ddp"]]


def test_the_order_of_the_path_decides_nothing(fresh, tmp_path):
    """Two folders of `pip install --target`, in both orders."""
    environment = fresh().install(CORE)
    places = [tmp_path / "one", tmp_path / "two"]
    for place, name in zip(places, ("mixle-ahead==1.0", "mixle-torch-ddp"), strict=True):
        environment.install(name, target=place)
    code = """
import json
import mixle_core as mx
from mixle_core.testing import toy_model
found = [list(mx.load_plugins().labels.values())]
for backend in (None, ["ahead", "torch_native"], ["torch_native", "ahead"]):
    try:
        found.append(mx.explain(toy_model(), mx.ParallelPlan(dp_replicate=2), backend=backend).owners)
    except mx.OwnershipError as error:
        found.append(str(error))
print(json.dumps(found))
"""
    said = [
        environment.run(environment.python, "-c", code, env={"PYTHONPATH": f"{first}:{second}"}).stdout
        for first, second in (places, places[::-1])
    ]
    assert said[0] == said[1]
    assert f'[["{AHEAD}", "{DDP}"], ' in said[0]
    assert said[0].rstrip().endswith(', ["ahead"], ["torch-ddp"]]')

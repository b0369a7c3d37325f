"""`infer_layout` on real ranks: models that transformers, torch and a hand split, what is refused, and the source under `verify`."""

from __future__ import annotations

import functools
import re
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import qwen3_by_transformers as qwen3
import split_models as models

import mixle_core as mx
from mixle_core.audit import infer_layout, verify
from mixle_core.testing import next_token_loss, run_ranks, token_batch

NARROW = {"MIXLE_PLUGINS": "dtensor-tp,torch-ddp"}
"""No installed layout plugin has a say."""

MADE = {
    "qwen3": (lambda: qwen3.parallel(torch.distributed.get_world_size(), 1), qwen3.reference),
    "moe": (partial(models.by_transformers, models.moe), models.moe),
    "tied": (partial(models.by_transformers, models.tied), models.tied),
    "heads": (models.repeated_keys, models.Heads),
    "one_key": (models.one_key, models.OneKey),
    "dropping": (models.dropping, partial(models.OneKey, dropout=0.5)),
    "one rank": (models.on_one_rank, models.Extra),
}


def build_of(what: str):
    """What builds the reference."""
    return MADE[what][1] if what in MADE else models.plain if what.isupper() else models.reference


def made(what: str):
    """The parallel model."""
    return MADE[what][0]() if what in MADE else models.planned(what) if what.isupper() else getattr(models, what)()


def drawn(what: str, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    if what in ("heads", "one rank"):
        return torch.randn(3, models.HIDDEN, generator=generator)
    return torch.randint(0, models.VOCAB, (2, 8), generator=generator)


def inferred(what: str):
    model = made(what)
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    training = [module.training for module in model.modules()]
    found = infer_layout(model, build_of(what)(), partial(drawn, what))
    assert before == {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    assert training == [module.training for module in model.modules()]
    return found


def on_ranks(what: str, number: int = 2):
    """What all ranks agree on."""
    first, *others = [outcome.value for outcome in run_ranks(inferred, number, what, reuse=True)]
    assert all(other == first for other in others)
    return first


def plugin(source: str) -> types.ModuleType:
    module = types.ModuleType("inferred")
    exec(compile(source, "inferred.py", "exec"), module.__dict__)
    return module


def verified(source: str, what: str, sizes: dict):
    """Error and verdict; of the parallel model nothing but its layout is left."""
    report = verify(
        build_of(what),
        mx.ParallelPlan(**sizes),
        loss=next_token_loss,
        batch=partial(token_batch, vocab=models.VOCAB),
        plugins={"inferred": plugin(source)},
    )
    return report.error, report.passed(1e-5)


def passes(source: str, what: str, **sizes):
    number = mx.ParallelPlan(**sizes).world_size
    return [outcome.value for outcome in run_ranks(verified, number, source, what, sizes, env=NARROW)]


ATTENTION = "model.layers.{layer}.self_attn.{name}.weight"


@pytest.fixture(scope="module")
def found():
    """Each model is measured once."""
    return functools.cache(on_ranks)


@pytest.mark.parametrize("what", ["qwen3", "moe"])
def test_roles_that_transformers_hides_are_measured(found, what):
    layout = found(what)
    assert layout.refusals == ()
    roles = {name: finding.role for name, finding in layout.findings.items()}
    for layer in (0, 1):
        for name in ("q_norm", "k_norm"):
            assert roles[ATTENTION.format(layer=layer, name=name)] == mx.Replica("partial")  # though transformers reduces them itself
        for name in ("q_proj", "k_proj"):
            assert roles[ATTENTION.format(layer=layer, name=name)] == mx.Shard(0)
        assert roles[f"model.layers.{layer}.input_layernorm.weight"] == mx.Replica("complete")
        assert roles[ATTENTION.format(layer=layer, name="o_proj")] == mx.Shard(1)
    heads = layout.layout.modules["model.layers.*.self_attn.{q,k}_proj"]
    assert heads.parameters == {"weight": mx.Shard(0, unit=8)}  # q_norm and k_norm see heads of 8
    if what == "moe":
        experts = layout.layout.modules["model.layers.*.mlp.experts"]
        assert experts.parameters == {"gate_up_proj": mx.Shard(1, parts=(16, 16)), "down_proj": mx.Shard(2)}
        assert set(experts.inputs) == {0, 2}  # hidden states and routing weights
        assert roles["model.layers.0.mlp.gate.weight"] == mx.Replica("complete")


@pytest.mark.parametrize("what", ["qwen3", "moe"])
def test_the_source_is_what_a_person_would_write(found, what, monkeypatch):
    monkeypatch.setenv(*next(iter(NARROW.items())))
    source = found(what).source()
    lines = source.splitlines()
    assert len(lines) <= 90
    assert max(map(len, lines)) <= 100
    assert "model.layers.0" not in source
    assert "(transformers 5" in " ".join(lines[:2])
    assert "one rank alone" in source
    explained = mx.explain(build_of(what)(), mx.ParallelPlan(tp=2), plugins={"inferred": plugin(source)})
    assert {row.role_text() for row in explained.rows if "q_norm" in row.name} == {"tp: Replica(partial)"}


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("what", ["qwen3", "moe"])
def test_verify_passes_with_the_source_alone(found, what, sizes):
    for error, passed in passes(found(what).source(), what, **sizes):
        assert passed, error


@pytest.mark.parametrize("what", ["by_hand", "norm_inside", "reduced_by_a_hook", "one_key", "tied", "PLAN", "ALONG_THE_SEQUENCE"])
def test_other_models_pass_too(found, what):
    layout = found(what)
    for error, passed in passes(layout.source(), what, tp=2, sequence_parallel=layout.sequence_parallel):
        assert passed, error


def test_fused_parts_of_zeros_and_a_bias_behind_the_sum(found):
    modules = found("by_hand").layout.modules
    fused = modules["blocks.*.gate_up"]
    assert fused.parameters == {"{weight,bias}": mx.Shard(0, parts=(16, 16))}  # the bias is all zeros: its gradient tells
    down = modules["blocks.*.down"]
    assert (down.parameters["bias"], down.once) == (mx.Replica("partial"), ("bias",))
    assert modules["blocks.*.norm"].inputs == {0: mx.Boundary(outside=mx.Replica("complete"), inside=mx.Replica("partial"))}
    assert found("by_hand").findings["blocks.0.norm.weight"].role == mx.Replica("partial")


def test_a_key_that_all_heads_share_frozen_and_unused_parameters(found):
    layout = found("one_key")
    roles = {name: finding.role for name, finding in layout.findings.items()}
    assert roles["key.weight"] == roles["key.bias"] == mx.Replica("partial")
    assert roles["head.bias"] == mx.Replica("complete")  # frozen
    assert layout.findings["unused"].evidence == "undecided: one process has no gradient of it in 5 batches"
    assert layout.layout.modules["query"].inputs == layout.layout.modules["key"].inputs  # each enters by itself


def test_dropout_on_slices_gets_masks_of_its_own(found):
    layout = found("dropping").layout
    assert {pattern for pattern, module in layout.modules.items() if module.sharded_dropout} == {"drop"}


def test_hooks_on_parameters_do_not_reduce_what_is_measured(found):
    hooked, plain = found("reduced_by_a_hook"), found("norm_inside")
    assert hooked.layout == plain.layout


def test_a_sequence_parallel_model_asks_for_its_plan(found):
    source = found("ALONG_THE_SEQUENCE").source()
    with pytest.raises(mx.CapabilityError, match="set sequence_parallel=True"):
        mx.explain(models.plain(), mx.ParallelPlan(tp=2), plugins={"inferred": plugin(source)})
    with pytest.raises(mx.CapabilityError, match="set sequence_parallel=False"):
        mx.explain(models.plain(), mx.ParallelPlan(tp=2, sequence_parallel=True), plugins={"inferred": plugin(found("PLAN").source())})
    assert plugin(source).declare_layout(models.plain(), mx.ParallelPlan(dp_replicate=2)) is None
    assert plugin(source).declare_layout(models.Heads(), mx.ParallelPlan(tp=2)) is None


@pytest.mark.parametrize(
    ("what", "number", "said"),
    [
        (
            "other_values",
            2,
            r"^blocks\.1\.gate_up\.weight: index 3 along dim 0 of rank 1's \[16, 8\] is nowhere in the reference's",
        ),
        ("odd_gradient", 2, r"^norm\.weight: its gradient is neither whole nor a term: .*ranks 0 and 1 differ by 0\.667"),
        ("heads", 4, r"^key\.weight: each group of ranks 0,1 \| 2,3 holds one slice of dim 0 together, 4 of 8: .*choose tp up to 2$"),
        ("TURNED", 2, r"^module 'head' would need a slice of dim 1 turned into one of dim -1"),
        ("renamed", 2, r"^norm\.weight: no rank of the parallel model holds a parameter of this name$"),
        ("random_slice", 2, r"^norm\.weight: the ranks' slices of dim 0 overlap or leave some of it out: 7 on each of 2 ranks, 8 in all$"),
        ("pairs_only", 4, r"^norm\.weight: gradients add up over a subgroup only, ranks 0,1 \| 2,3; a role is about all 4 ranks$"),
    ],
)
def test_what_no_layout_says_is_refused_with_its_numbers(what, number, said):
    layout = on_ranks(what, number)
    assert layout.layout is None
    assert re.search(said, layout.refusals[0]), layout.refusals
    with pytest.raises(mx.UsageError, match="no layout can say what was found"):
        layout.source()


def test_a_parameter_on_one_rank_names_the_rank():
    layout = on_ranks("one rank")
    assert layout.findings["extra.weight"].role == mx.Replica("complete", ranks=(0,))
    assert 'Replica("complete", ranks=(0,))' in layout.source()


EDITS = {
    "a sum forgotten": ('_norm": ModuleLayout(parameters={"weight": SHARED})', '_norm": ModuleLayout(parameters={"weight": WHOLE})'),
    "a boundary forgotten": ('{"weight": Shard(1)}, output=LEAVE)', '{"weight": Shard(1)})'),
}


def broken(source: str, what: str):
    try:
        return verified(source, what, {"tp": 2})[1]
    except mx.DeclarationError as error:
        return str(error)


@pytest.mark.parametrize("edit", EDITS)
def test_a_wrong_edit_fails_verification(found, edit):
    source = found("qwen3").source()
    assert EDITS[edit][0] in source
    for outcome in run_ranks(broken, 2, source.replace(*EDITS[edit]), "qwen3", env=NARROW):
        assert outcome.value is False or "contradicted by the first gradients" in outcome.value


def test_one_rank_or_one_batch_is_refused():
    with pytest.raises(mx.UsageError, match="one rank splits nothing"):
        infer_layout(models.reference(), models.reference(), partial(drawn, ""))
    for outcome in run_ranks(one_batch, 2, reuse=True):
        assert outcome.value == "infer_layout: batches=1; one can agree by accident, so at least 2 are needed"


def one_batch():
    with pytest.raises(mx.UsageError) as raised:
        infer_layout(models.reference(), models.reference(), partial(drawn, ""), batches=1)
    return str(raised.value)


def other_function():
    with pytest.raises(mx.UsageError) as raised:
        infer_layout(models.odd_function(), models.reference(), partial(drawn, ""))
    return str(raised.value)


def test_another_function_is_no_split():
    for outcome in run_ranks(other_function, 2, reuse=True):
        assert "other values than the reference's [2, 8, 32] (relative errors of the ranks 1, 1)" in outcome.value

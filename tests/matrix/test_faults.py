"""What must be an error, or change nothing, with the real plugins: on every rank, before the optimizer steps."""

from __future__ import annotations

import math
import os
import time

import attrs
import pytest
import torch
import torch.distributed as dist
from mixle_qwen3.layout import qwen3_layout

import mixle_core as mx
from mixle_core.testing import OwnsEverything, ToyLayout, next_token_loss, run_ranks, token_batch, toy_model

Plan = mx.ParallelPlan
NATIVE = "dtensor-tp,torch-ddp,torch-fsdp2"
PLANS = [
    Plan(),
    Plan(dp_replicate=2),
    Plan(dp_shard=2),
    Plan(dp_replicate=2, dp_shard=2),
    Plan(tp=2),
    Plan(tp=2, sequence_parallel=True),
    Plan(dp_replicate=2, tp=2),
    Plan(dp_shard=2, tp=2),
    Plan(dp_shard=2, tp=2, sequence_parallel=True),
]
TP_PLANS = [plan for plan in PLANS if plan.tp > 1]


def describe(plan):
    return plan.describe().replace("=", "").replace(" ", "") + ("-sp" if plan.sequence_parallel else "")


def poisoned_loss(module, batch):
    loss, tokens = next_token_loss(module, batch["ids"])
    return loss * batch["factor"], tokens


def state_of(session):
    values = {
        name: p.to_local().clone() if hasattr(p, "to_local") else p.detach().clone() for name, p in session.reduction.named_parameters()
    }
    optimizer = session.optimizers["**"]
    for index, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            values[f"{index}.{key}"] = value.to_local().clone() if hasattr(value, "to_local") else value.clone()
    values["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
    return values


def nonfinite_on_one_rank(plan, poison):
    session = mx.prepare(
        toy_model(),
        plan,
        loss=poisoned_loss,
        optimizer=torch.optim.AdamW,
        schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        max_grad_norm=1.0,
        plugins={"toy": ToyLayout()},
    )
    at = session.reduction.mesh.coordinates
    data_rank = at["dp_replicate"] * plan.dp_shard + at["dp_shard"]
    receipts = []
    for update in range(4):
        bad = update in (0, 2) and data_rank == plan.data_size - 1
        before = state_of(session)
        receipts.append(session.train_batch({"ids": token_batch(update, 0, data_rank), "factor": poison if bad else 1.0}))
        after = state_of(session)
        changed = before.keys() != after.keys() or any(not torch.equal(before[key], after[key]) for key in before)
        assert changed == (receipts[-1].skipped is None)
    return (
        [(r.skipped is not None, math.isfinite(r.grad_norm), r.learning_rate) for r in receipts],
        session.num_skipped,
        receipts[0].skipped,
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("plan", PLANS, ids=describe)
def test_a_rank_local_non_finite_gradient_changes_nothing_anywhere(plan, poison):
    outcomes = [o.value for o in run_ranks(nonfinite_on_one_rank, plan.world_size, plan, poison, reuse=True)]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    seen, num_skipped, why = outcomes[0]
    assert [skipped for skipped, _, _ in seen] == [True, False, True, False]
    assert [finite for _, finite, _ in seen] == [False, True, False, True]
    assert [rate for _, _, rate in seen] == pytest.approx([1e-3, 1e-3, 9e-4, 9e-4])
    assert num_skipped == 2
    assert why.startswith("non-finite gradient: blocks.0.branch.bias")


class Misdeclared:
    """Qwen3's layout with some roles replaced."""

    def __init__(self, pattern, role):
        self.pattern = pattern
        self.role = role

    @mx.hookimpl
    def declare_layout(self, model, plan):
        layout = qwen3_layout(model, model.config, plan)
        modules = {
            pattern: attrs.evolve(
                module,
                parameters={
                    local: self.role if f"{pattern}.{local}" == self.pattern else role for local, role in module.parameters.items()
                },
            )
            for pattern, module in layout.modules.items()
        }
        return attrs.evolve(layout, modules=modules)


def qwen3_tiny():
    from mixle_qwen3.build import build

    return build("tiny")


def misdeclared(plan, pattern, role):
    reduction = mx.attach(qwen3_tiny(), plan, plugins={"wrong": Misdeclared(pattern, role)})
    before = {name: p.detach().clone() for name, p in reduction.named_parameters()}
    loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, 0, length=16))
    loss.backward()
    try:
        reduction.finish(tokens)
    except mx.DeclarationError as error:
        assert all(torch.equal(before[name], p.detach()) for name, p in reduction.named_parameters())
        return str(error)
    return "accepted"


DIFFER = "{} on tp: declared Replica(complete), but the ranks' gradients differ"
SAME = "{} on tp: declared Replica(partial), but all ranks computed the same gradient"
QK, LAYER = "model.layers.*.self_attn.{q,k}_norm.weight", "model.layers.*.{input,post_attention}_layernorm.weight"


@pytest.mark.parametrize(
    ("pattern", "role", "sequence_parallel", "said"),
    [
        (QK, "complete", False, DIFFER.format("q_norm.weight")),
        (LAYER, "partial", False, SAME.format("input_layernorm.weight")),
        (LAYER, "complete", True, DIFFER.format("input_layernorm.weight")),
        ("model.norm.weight", "partial", False, SAME.format("model.norm.weight")),
    ],
    ids=["qk-norm-complete", "input-norm-partial", "input-norm-complete-under-sp", "final-norm-partial"],
)
@pytest.mark.parametrize("axes", [{}, {"dp_replicate": 2}, {"dp_shard": 2}], ids=["tp2", "ddp2xtp2", "fsdp2xtp2"])
def test_a_wrong_declaration_is_an_error_on_every_rank_at_the_first_update(axes, pattern, role, sequence_parallel, said):
    plan = Plan(tp=2, sequence_parallel=sequence_parallel, **axes)
    outcomes = run_ranks(misdeclared, plan.world_size, plan, pattern, mx.Replica(role), env={"MIXLE_PLUGINS": NATIVE})
    for outcome in outcomes:
        assert said in outcome.value, outcome.value
    assert len({outcome.value for outcome in outcomes}) == 1


class WithoutDropout(ToyLayout):
    """The same roles with another boundary."""

    @mx.hookimpl
    def declare_layout(self, model, plan):
        layout = super().declare_layout(model, plan)
        return attrs.evolve(layout, modules={**layout.modules, "blocks.0": mx.ModuleLayout(sharded_dropout=True)})


def other_plugins_on_the_last_rank(difference):
    rank, plan = dist.get_rank(), Plan(dp_shard=2)
    model, seed, plugins = toy_model(), 0, {"toy": ToyLayout()}
    last = rank == dist.get_world_size() - 1
    if last and difference == "plugins":
        os.environ["MIXLE_PLUGINS"] = "torch-fsdp2,dtensor-tp"
    if last and difference == "plan":
        plan = Plan(dp_shard=2, gradient_accumulation_steps=2)
    if last and difference == "mesh":
        plan = Plan(dp_replicate=2)
    if last and difference == "trainable":
        model.head.weight.requires_grad_(False)
    if last and difference == "layout":
        plugins = {"toy": ToyLayout({"norm": mx.Replica("partial")})}
    if last and difference == "boundaries":
        plugins = {"toy": WithoutDropout()}
    if last and difference == "broken":
        os.environ["MIXLE_PLUGINS"] = "torch-fsdp3"
    started = time.monotonic()
    try:
        mx.attach(model, plan, seed=seed, plugins=plugins)
    except mx.MixleError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "attached", 0.0


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ("plugins", "at plugins"),
        ("plan", "at plan.gradient_accumulation_steps: 2 against 1"),
        ("mesh", "at plan.dp_replicate: 2 against 1"),
        ("trainable", "trainable: false against true"),
        ("layout", 'roles.tp: "Replica(partial)" against "Replica(complete)"'),
        ("boundaries", "at tensor_layouts.tp.blocks.0"),
        ("broken", "no plugin named 'torch-fsdp3' is installed (did you mean 'torch-fsdp2'?)"),
    ],
)
def test_ranks_that_disagree_fail_everywhere_within_seconds(difference, said):
    outcomes = run_ranks(other_plugins_on_the_last_rank, 2, difference, env={"MIXLE_PLUGINS": NATIVE})
    for outcome in outcomes:
        text, seconds = outcome.value
        assert said in text, text
        assert seconds < 20.0
    assert "rank 1" in outcomes[0].value[0]


@pytest.mark.parametrize("plan", TP_PLANS, ids=describe)
def test_an_undeclared_parameter_under_tp_is_refused_with_a_stub(plan):
    class Grown(torch.nn.Module):
        pass

    model = qwen3_tiny()
    model.model.layers[0].extra = torch.nn.Linear(4, 4, bias=False, device="meta")
    with pytest.raises(mx.LayoutError, match=r'"model.layers.\*.extra": ModuleLayout\(parameters=\{"weight": Replica\("complete"\)\}\)'):
        mx.explain(model, plan)


def test_two_claims_name_both_claimants_and_the_way_out():
    with pytest.raises(mx.OwnershipError) as raised:
        mx.explain(toy_model(), Plan(dp_replicate=2), plugins={"toy": ToyLayout(), "double": OwnsEverything()})
    text = str(raised.value)
    assert "each trainable parameter needs exactly one owner; several for 22 of 22" in text
    assert "double (passed in code) and torch-ddp (mixle-torch-ddp 0.1.0)" in text
    assert text.endswith("way out: choose with backend=..., or leave one of them out of MIXLE_PLUGINS")


def test_the_backend_settles_it_by_preference():
    plugins = {"toy": ToyLayout(), "double": OwnsEverything()}
    for backend, owner in (
        (["torch_native", "double"], "torch-ddp"),
        (["double", "torch_native"], "double"),
        ("torch_native", "torch-ddp"),
    ):
        table = mx.explain(toy_model(), Plan(dp_replicate=2), backend=backend, plugins=plugins)
        assert table.owners == (owner,)


def test_no_claim_shows_what_every_plugin_declined_and_what_would_serve():
    with pytest.raises(mx.OwnershipError) as raised:
        mx.explain(toy_model(), Plan(dp_shard=2), plugins=["dtensor-tp", "torch-ddp"])
    assert (
        "torch-ddp (mixle-torch-ddp 0.1.0) declined: dp_shard=2 shards parameters; set dp_shard=1, or install and enable torch-fsdp2"
        in str(raised.value)
    )

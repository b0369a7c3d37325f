"""Qwen3 as users vary it: biases, dropout, another head or none, padding, packed rows, generation. Each equals one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from mixle_qwen3.build import SIZES
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForTokenClassification, Qwen3Model

import mixle_core as mx
from mixle_core.audit import VerifyReport, reference_model, relative_error, verify
from mixle_core.testing import next_token_loss, run_ranks, token_batch

PLANS = {
    "tp2": mx.ParallelPlan(tp=2),
    "tp2-sp": mx.ParallelPlan(tp=2, sequence_parallel=True),
    "ddp2xtp2": mx.ParallelPlan(dp_replicate=2, tp=2),
    "ddp2xtp2-sp": mx.ParallelPlan(dp_replicate=2, tp=2, sequence_parallel=True),
    "fsdp2xtp2": mx.ParallelPlan(dp_shard=2, tp=2),
    "fsdp2xtp2-sp": mx.ParallelPlan(dp_shard=2, tp=2, sequence_parallel=True),
}
ids_of_both_halves = functools.partial(token_batch, vocab=256)
"""Ids from the slices of the vocabulary of both tp ranks."""


def tiny(kind: Any = Qwen3ForCausalLM, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = kind(Qwen3Config(**{**SIZES["tiny"], **changes}))
    return model


def biased() -> nn.Module:
    """With values: transformers starts biases at zero, where adding one twice would not be seen.

    They are as large as the weights: larger ones make all tokens alike, and their gradients cancel down to fp32 rounding.
    """
    torch.manual_seed(0)
    model: nn.Module = Qwen3ForCausalLM(Qwen3Config(**{**SIZES["tiny"], "attention_bias": True}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model


class Score:
    """A layout plugin for the head that a classification model puts on a Qwen3 model; it waits for the rest to be declared."""

    @mx.hookimpl
    def declare_layout(self, model: Any, plan: mx.ParallelPlan, declared: Any) -> mx.ModelLayout | None:
        if not hasattr(model, "score") or not any("tp" in roles for roles in declared.values()):
            return None
        whole = mx.Replica("complete")
        return mx.ModelLayout(axis="tp", modules={"score": mx.ModuleLayout(parameters={"{weight,bias}": whole})})


def label_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(module(ids).logits.flatten(0, 1), ids.flatten() % 5, reduction="sum"), ids.numel()


def fixed_head_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A head that is not trained, outside of the model."""
    head = torch.randn(64, 5, generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(module(ids).last_hidden_state.flatten(0, 1) @ head, ids.flatten() % 5, reduction="sum"), ids.numel()


def padded(update: int, backward: int, data_rank: int) -> dict[str, torch.Tensor]:
    """One row padded on the right, one on the left."""
    ids = ids_of_both_halves(update, backward, data_rank)
    ids[0, 5:] = 0
    ids[1, :2] = 0
    return {"ids": ids, "attention_mask": (ids != 0).long()}


def packed(update: int, backward: int, data_rank: int) -> dict[str, torch.Tensor]:
    """One row of two documents."""
    ids = token_batch(update, backward, data_rank, rows=1, vocab=256)
    return {"ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}


@attrs.frozen
class Variant:
    build: Callable[[], nn.Module] = tiny
    batch: Callable[[int, int, int], Any] = ids_of_both_halves
    loss: Callable[[nn.Module, Any], tuple[torch.Tensor, int]] = next_token_loss


VARIANTS = {
    "attention-bias": Variant(biased),
    "attention-dropout": Variant(functools.partial(tiny, attention_dropout=0.5)),
    "bare": Variant(functools.partial(tiny, Qwen3Model), loss=fixed_head_loss),
    "other-head": Variant(functools.partial(tiny, Qwen3ForTokenClassification, num_labels=5, classifier_dropout=0.0), loss=label_loss),
    "padding": Variant(batch=padded),
    "packed": Variant(batch=packed),
}


def verify_on_rank(plan: mx.ParallelPlan, variant: str) -> VerifyReport:
    it = VARIANTS[variant]
    return verify(it.build, plan, loss=it.loss, batch=it.batch, windows=[2, 1, 2], max_grad_norm=0.05, plugins={"score": Score()})


def report(plan_name: str, variant: str, **changes: Any) -> VerifyReport:
    plan = attrs.evolve(PLANS[plan_name], gradient_accumulation_steps=2, **changes)
    found: VerifyReport = run_ranks(verify_on_rank, plan.world_size, plan, variant, timeout_s=90, reuse=True)[0].value
    return found


CELLS = [
    *((plan_name, "attention-bias") for plan_name in PLANS),
    *itertools.product(["tp2", "tp2-sp", "ddp2xtp2", "fsdp2xtp2-sp"], ["bare", "other-head", "padding", "packed"]),
]


@pytest.mark.parametrize(("plan_name", "variant"), CELLS)
def test_variants_equal_one_process(plan_name, variant):
    found = report(plan_name, variant)
    assert found.passed(1e-5), found


@pytest.mark.parametrize(("plan_name", "recompute"), [("tp2", True), ("tp2-sp", False), ("ddp2xtp2", False), ("fsdp2xtp2", True)])
def test_attention_dropout_keeps_copies_equal(plan_name, recompute):
    found = report(plan_name, "attention-dropout", activation_checkpointing=recompute)
    assert all(update.copies_equal and update.skipped is None for update in found.updates)
    assert found.updates[0].gradient_error > 1e-3, "nothing was dropped"


def test_packed_documents_do_not_see_each_other():
    """What the packed case rests on: transformers masks by the positions."""
    batch, model = packed(0, 0, 0), reference_model(tiny, 0)
    together, alone = model(batch["ids"], position_ids=batch["position_ids"]).logits, model(batch["ids"][:, 3:]).logits
    assert relative_error(together[:, 3:].detach(), alone.detach()) <= 1e-5
    assert relative_error(model(batch["ids"]).logits[:, 3:].detach(), alone.detach()) > 1e-3


def evaluate_on_rank(plan: mx.ParallelPlan) -> dict[str, float]:
    """Without gradients, between updates, through the module that training calls."""
    session = mx.prepare(tiny(), plan, loss=next_token_loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    reference, batch = reference_model(tiny, 0), ids_of_both_halves(0, 0, 0)
    mean = {}
    for moment in ("before", "after"):
        mean[moment] = session.evaluate([batch, batch])
        with torch.no_grad():
            logits = session.module(batch).logits
        if moment == "before":
            mean["logits"] = relative_error(logits, reference(batch).logits.detach())
            loss, tokens = next_token_loss(reference, batch)
            mean["reference"] = float(loss.detach()) / tokens
            mean["trained"] = session.train_batch(batch).loss
    return mean


@pytest.mark.parametrize("plan_name", list(PLANS))
def test_evaluation_between_updates_equals_one_process_and_leaves_training_alone(plan_name):
    for outcome in run_ranks(evaluate_on_rank, PLANS[plan_name].world_size, PLANS[plan_name], timeout_s=60, reuse=True):
        mean = outcome.value
        assert mean["logits"] <= 1e-5
        assert mean["before"] == pytest.approx(mean["reference"], rel=1e-6) == mean["trained"]
        assert mean["after"] < mean["before"] - 1e-3


def generate_on_rank(use_cache: bool) -> tuple[list[list[int]], list[list[int]]]:
    reduction, reference = mx.attach(tiny(), PLANS["tp2"]), reference_model(tiny, 0)
    prompt = ids_of_both_halves(0, 0, 0, length=4)
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": use_cache, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        ours, wanted = (
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **options) for model in (reduction.module, reference)
        )
    return ours.tolist(), wanted.tolist()


@pytest.mark.parametrize("use_cache", [False, True])
def test_greedy_generation_under_tp_writes_what_one_process_writes(use_cache):
    for outcome in run_ranks(generate_on_rank, 2, use_cache, timeout_s=60, reuse=True):
        ours, wanted = outcome.value
        assert ours == wanted and len(ours[0]) == 10

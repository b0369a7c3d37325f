"""Every composition equals one process: gradients, both global norms, parameters after three AdamW updates, copies to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import mixle_core as mx
from mixle_core.audit import VerifyReport, verify
from mixle_core.testing import ToyLayout, next_token_loss, run_ranks, tied_toy_model, token_batch, toy_model

Plan = mx.ParallelPlan

PLANS = {
    "ddp2": Plan(dp_replicate=2),
    "fsdp2": Plan(dp_shard=2),
    "hsdp2x2": Plan(dp_replicate=2, dp_shard=2),
    "tp2": Plan(tp=2),
    "tp2-sp": Plan(tp=2, sequence_parallel=True),
    "ddp2xtp2": Plan(dp_replicate=2, tp=2),
    "ddp2xtp2-sp": Plan(dp_replicate=2, tp=2, sequence_parallel=True),
    "fsdp2xtp2": Plan(dp_shard=2, tp=2),
    "fsdp2xtp2-sp": Plan(dp_shard=2, tp=2, sequence_parallel=True),
}
TOY = {"toy": ToyLayout()}


@functools.cache
def plugins() -> Any:
    """As a user's command line finds them, once in each process."""
    return mx.load_plugins(required=["qwen3"])


def qwen3(spec: str) -> Callable[[], nn.Module]:
    """The plugin's builder."""

    def build() -> nn.Module:
        model: nn.Module = plugins().ask_one("qwen3", "build_model", spec=spec)
        return model

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "toy": toy_model,
    "toy-tied": tied_toy_model,
    "qwen3": qwen3("tiny"),
    "qwen3-tied": qwen3("tiny-tied"),
}


def uneven(update: int, backward: int, data_rank: int) -> torch.Tensor:
    """The first data rank has no loss token at all, the others lose some."""
    ids = token_batch(update, backward, data_rank)
    ids[:, (0 if data_rank == 0 else 5) :] = 0
    return ids


def branch_unused(update: int, backward: int, data_rank: int) -> dict[str, Any]:
    """Every rank leaves the branches out in the second update."""
    return {"ids": token_batch(update, backward, data_rank), "use_branch": update != 1}


def branch_on_one_rank(update: int, backward: int, data_rank: int) -> dict[str, Any]:
    """Only the first data rank ever uses the branches, and only in its first backward."""
    return {"ids": token_batch(update, backward, data_rank), "use_branch": data_rank == 0 and backward == 0}


def branch_in_last_backward(update: int, backward: int, data_rank: int) -> dict[str, Any]:
    """The branches appear in the last backward of a window only."""
    return {"ids": token_batch(update, backward, data_rank), "use_branch": backward > 0}


BATCHES: dict[str, Callable[[int, int, int], Any]] = {
    "even": token_batch,
    "uneven": uneven,
    "branch-unused": branch_unused,
    "branch-on-one-rank": branch_on_one_rank,
    "branch-in-last-backward": branch_in_last_backward,
}


def frozen(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model with its embedding, every norm and one whole block frozen."""

    def built() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            if "embed" in name or "norm" in name or ".1." in name:
                parameter.requires_grad_(False)
        return model

    return built


def run_cell(plan: Plan, model: str, batch: str, freeze: bool, options: dict[str, Any]) -> VerifyReport:
    """On a rank: verify one cell."""
    build = frozen(MODELS[model]) if freeze else MODELS[model]
    tokens = functools.partial(BATCHES[batch], vocab=256) if model.startswith("qwen3") else BATCHES[batch]  # rows of every tp rank
    return verify(build, plan, loss=next_token_loss, batch=tokens, plugins=TOY, **options)


FP32, BF16 = 1e-5, 3e-2
NAMES = list(PLANS)


def check(name, model, tolerance=FP32, *, batch="even", freeze=False, plan=None, **options):
    plan = plan or PLANS[name]
    outcomes = run_ranks(run_cell, plan.world_size, plan, model, batch, freeze, options, reuse=True)
    report = outcomes[0].value
    assert report.passed(tolerance), report
    return report


@pytest.mark.parametrize("clip", [0.05, None], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("windows", [(1, None), (4, [4, 2, 4])], ids=["accumulation-1", "accumulation-4-with-a-window-of-2"])
@pytest.mark.parametrize("name", NAMES)
def test_qwen3_equals_one_process(name, windows, clip):
    steps, lengths = windows
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=steps)
    check(name, "qwen3", plan=plan, windows=lengths, max_grad_norm=clip)


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_torch_model_with_biases_and_a_fused_matrix_equals_one_process(name):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2)
    check(name, "toy", plan=plan, windows=[2, 1, 2], max_grad_norm=0.05)


def test_data_parallel_4_times_tensor_parallel_2_on_eight_processes():
    plan = Plan(dp_shard=4, tp=2, gradient_accumulation_steps=2)
    check("", "qwen3", plan=plan, max_grad_norm=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["toy-tied", "qwen3-tied"])
def test_tied_weights(name, model):
    check(name, model, max_grad_norm=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_with_different_numbers_of_loss_tokens_and_one_with_none(name):
    data = PLANS[name].data_size
    batch = "uneven" if data > 1 else "even"
    report = check(name, "toy", batch=batch)
    assert report.updates[0].num_tokens == (2 * 7 if data == 1 else (data - 1) * 2 * 4)


@pytest.mark.parametrize("name", NAMES)
def test_frozen_parameters(name):
    check(name, "qwen3", freeze=True)
    check(name, "toy", freeze=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", ["branch-on-one-rank", "branch-in-last-backward"])
def test_use_that_varies_is_found_by_the_first_update(name, batch):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2)
    check(name, "toy", batch=batch, plan=plan, windows=[2, 1, 2] if batch == "branch-on-one-rank" else None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_parameter_unused_on_all_ranks_in_a_later_update_when_the_plan_says_so(name, steps):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=steps, unused_parameters=True)
    check(name, "toy", batch="branch-unused", plan=plan)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model", ["toy", "qwen3"])
def test_activation_checkpointing(name, model):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2, activation_checkpointing=True)
    check(name, model, plan=plan)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_stays_near_the_fp32_reference(name):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2, precision="bf16")
    check(name, "qwen3", BF16, plan=plan)


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2xtp2"])
def test_bf16_with_a_parameter_used_in_the_last_backward_only(name):
    """C50: the sum in the last backward meets two dtypes; accumulating first and reducing afterwards does not."""
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2, precision="bf16")
    check(name, "toy", BF16, batch="branch-in-last-backward", plan=plan)


def test_size_one_on_every_axis_changes_nothing():
    """C20: eight microbatches on one rank, with every plugin installed."""
    check("", "qwen3", plan=Plan(gradient_accumulation_steps=4, microbatches=2))

"""Faults that users of other tools met in public (CASES.md), against the real library; and what its finaliser leaves out."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mixle_core as mx
from mixle_core.audit import verify
from mixle_core.audit.compare import relative_error
from mixle_core.runtime import attach
from mixle_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import models
from models import LENGTH, VOCAB, batch, gradients, model, plugins

Plan = mx.ParallelPlan


def ratio(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(found.norm() / wanted.norm())


def worst(found: dict[str, tuple[Any, Any]]) -> float:
    return max(relative_error(ours, theirs) for ours, theirs in found.values())


# ------------------------------------------------------------------------------------------- C07: norms by name


def named_norms_verified(plan: mx.ParallelPlan) -> Any:
    return verify(models.named_norms, plan, loss=models.next_token_loss, batch=batch, backend="megatron", plugins=plugins())


@pytest.mark.parametrize("plan", [Plan(tp=2, microbatches=2), Plan(tp=2, pp=2, microbatches=2)], ids=["tp2", "pp2xtp2"])
def test_norms_of_split_heads_are_summed_whatever_their_name(plan):
    """C07."""
    report = run_ranks(named_norms_verified, plan.world_size, plan, reuse=True)[0].value
    assert report.passed(1e-5), report


def finalised(build: str, plan: mx.ParallelPlan, fields: dict[str, Any], values: list[float]) -> tuple[dict[str, float], list[str], Any]:
    """What Megatron's own finaliser makes of gradients that are `values[rank]` everywhere, and what the owner adds to it."""
    from megatron.core.distributed import finalize_model_grads

    made = getattr(models, build, None) or model(build)
    reduction = attach(made(**fields), plan, backend="megatron", seed=0, plugins=plugins())
    owner = reduction._owners["megatron"]
    for parameter in owner._parameters.values():
        parameter.main_grad.fill_(values[reduction.mesh.rank])
    finalize_model_grads([owner._ddp], None, pg_collection=owner._groups)
    found = {name: float(parameter.main_grad.flatten()[0]) for name, parameter in owner._parameters.items()}
    reduction.zero()
    sizes = {row.name: row.group_size for row in reduction.table.rows}
    reduction.close()
    return found, owner._left_out, sizes


def test_megatrons_finaliser_goes_by_the_name_of_a_norm():
    """C07, the upstream fault: with 1 and 2 on two ranks, q_layernorm has their sum, and others stay as they are."""
    outcomes = run_ranks(finalised, 2, "named_norms", Plan(tp=2), {}, [1.0, 2.0], reuse=True)
    for rank, outcome in enumerate(outcomes):
        found, left_out, sizes = outcome.value
        attention = "decoder.layers.0.self_attention"
        assert found[f"{attention}.q_layernorm.weight"] == found[f"{attention}.k_layernorm.weight"] == 3.0
        assert found[f"{attention}.q_norm.weight"] == found[f"{attention}.out_norm.weight"] == [1.0, 2.0][rank]
        ours = {f"decoder.layers.{layer}.self_attention.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "out_norm")}
        assert set(left_out) == ours
        assert all(sizes[name] == 2 for name in ours)


def attached(build: str, plan: mx.ParallelPlan, fields: dict[str, Any]) -> None:
    made = getattr(models, build)(**fields) if hasattr(models, build) else model(build, **fields)()
    attach(made, plan, backend="megatron", seed=0, plugins=plugins()).close()


def test_a_complete_norm_with_the_name_of_a_partial_one_is_refused():
    """C07, turned round: Megatron would add up what every rank has computed whole."""
    for outcome in run_ranks(attached, 2, "norm_with_a_known_name", Plan(tp=2), {}, check=False):
        assert outcome.error == "CapabilityError", outcome.trace
        name = re.escape("decoder.layers.0.input_layernorm.q_layernorm.weight")
        assert re.search(rf"{name}: Megatron adds up 2 ranks' gradients, the table says 1", outcome.message)
        assert "2 parameters" in outcome.message and "rename the module" in outcome.message


# ------------------------------------------------------------------------------- C10: two sums of a tied embedding


TIED = "embedding.word_embeddings.weight"


def tied_sums(vocab: int) -> tuple[float, tuple[int, int], int]:
    """(error of the tied gradient's slice, that slice, parameters in its bucket) after both reductions of known gradients."""
    plan = Plan(dp_shard=2, pp=2)
    reduction = attach(model("tiny-tied", vocab_size=vocab)(), plan, backend="megatron", seed=0, plugins=plugins())
    owner, mesh = reduction._owners["megatron"], reduction.mesh
    parameter = owner._parameters[TIED]
    terms = [torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    parameter.main_grad.copy_(terms[mesh.rank])
    owner._finalise()
    part = owner._slices[TIED]
    error = relative_error(owner._final(TIED).clone(), sum(terms).reshape(-1)[part])
    held = [len(bucket.params_list) for buffer in owner._ddp.buffers for bucket in buffer.buckets if parameter in bucket.params]
    reduction.close()
    return error, (part.start, part.stop), held[0]


@pytest.mark.parametrize("vocab", [64, 67])
def test_a_tied_embedding_is_summed_over_data_and_stages_on_equal_slices(vocab):
    """C10: Megatron scatters over data first; the embedding has a bucket of its own, so both stages hold the same slices."""
    found = [outcome.value for outcome in run_ranks(tied_sums, 4, vocab, reuse=True)]
    assert max(error for error, _, _ in found) < 1e-6
    assert [number for _, _, number in found] == [1, 1, 1, 1]
    slices = [part for _, part, _ in found]
    assert slices[:2] == slices[2:]
    assert slices[0][1] == slices[1][0] and slices[0][0] == 0 and slices[1][1] == vocab * 32


UNEVEN = {
    "pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.float32,
    "num_layers": 3,
    "num_layers_in_first_pipeline_stage": 1,
    "num_layers_in_last_pipeline_stage": 2,
}


def attached_without_the_mark() -> None:
    """As a provider would that makes its own copy of the embedding, without Megatron's mark on it."""
    shell = model("tiny-tied", vocab_size=600, **UNEVEN)()
    inner = shell.provider

    def provider(**arguments: Any) -> Any:
        part = inner(**arguments)
        for parameter in part.parameters():
            parameter.__dict__.pop("shared_embedding", None)
        return part

    shell.provider = provider
    attach(shell, Plan(dp_shard=2, pp=2), backend="megatron", seed=0, plugins=plugins()).close()


def test_a_tied_embedding_in_different_places_of_two_stages_buffers_is_refused():
    """C10, the fault itself: slices at different offsets, of which the sum over stages would mix finished and unfinished ones."""
    outcomes = run_ranks(attached_without_the_mark, 4, check=False)
    assert {outcome.error for outcome in outcomes} <= {"CapabilityError", "UsageError"}, outcomes[0].trace
    for outcome in outcomes:
        assert re.search(rf"{re.escape(TIED)}: Megatron adds up .* ranks' gradients, the table says 4", outcome.message), outcome.message


# --------------------------------------------------------------------------------------- C11: scale of the experts


def update_of(size: str, plan: mx.ParallelPlan, fields: dict[str, Any], loss_scale: float = 1.0) -> tuple[float, dict[str, float]]:
    """(largest error, ratio to one process by name)."""
    found = gradients(model(size, **fields), plan, lambda i, data_rank: batch(0, i, data_rank), loss_scale=loss_scale)
    return worst(found), {name: ratio(*pair) for name, pair in found.items()}


TOP_1 = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
SCALES = {
    "ep1": Plan(dp_replicate=2),
    "ep1-sharded": Plan(dp_shard=2),
    "ep2": Plan(dp_replicate=2, ep=2),
    "ep2-sharded": Plan(dp_shard=2, ep=2),
    "ep2 of dp4": Plan(dp_replicate=4, ep=2),
}


@pytest.mark.parametrize("name", SCALES)
def test_experts_have_the_scale_of_one_process(name):
    """C11: an expert's gradient holds the tokens of all its ep ranks, and is summed over the ranks with a copy of it."""
    plan = SCALES[name]
    for outcome in run_ranks(update_of, plan.world_size, "tiny-moe", plan, TOP_1, reuse=True):
        error, ratios = outcome.value
        experts = [value for parameter, value in ratios.items() if ".experts." in parameter]
        assert len(experts) == 8 and experts == pytest.approx([1.0] * 8, abs=1e-6)
        assert error < 1e-5


AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**-6])
def test_a_loss_that_balances_experts_follows_the_loss_scale(loss_scale):
    """It is added to the gradient inside, beside the loss that a session multiplies by a power of two before backward."""
    for outcome in run_ranks(update_of, 2, "tiny-moe", Plan(dp_replicate=2, ep=2), AUXILIARY, loss_scale, reuse=True):
        assert outcome.value[0] < 1e-5


def test_megatrons_finaliser_forgets_ranks_of_tp_that_hold_whole_experts_when_ep_is_1():
    """With tp=2 and etp=1, each tp rank's experts see half of the tokens; without ep, Megatron has them among the dense ones."""
    plan = Plan(tp=2, etp=1, sequence_parallel=True)
    for outcome in run_ranks(finalised, 2, "tiny-moe", plan, {}, [1.0, 1.0], reuse=True):
        found, left_out, sizes = outcome.value
        experts = {name for name in found if ".experts." in name}
        assert len(experts) == 16
        assert {found[name] for name in experts} == {1.0}
        assert {sizes[name] for name in experts} == {2}
        assert set(left_out) == experts


def test_with_ep_megatrons_finaliser_has_those_ranks():
    plan = Plan(dp_replicate=2, tp=2, ep=2, etp=1, sequence_parallel=True)
    for outcome in run_ranks(finalised, 4, "tiny-moe", plan, {}, [1.0] * 4, reuse=True):
        found, left_out, _ = outcome.value
        assert {value for name, value in found.items() if ".experts." in name} == {2.0}
        assert left_out == []


def test_experts_cut_finer_than_the_rest_are_refused_without_ep():
    """tp=1 and etp=2: the two ranks hold halves of an expert, and Megatron adds them up as if they were copies."""
    for outcome in run_ranks(attached, 2, "tiny-moe", Plan(dp_replicate=2, etp=2), {}, check=False):
        assert outcome.error == "CapabilityError", outcome.trace
        assert re.search(r"experts\.\S+weight: Megatron adds up 2 ranks' gradients, the table says 1", outcome.message), outcome.message
        assert "16 parameters" in outcome.message and "change the plan" in outcome.message


# -------------------------------------------------------------------------------------------- C19: denominators


def short_rank(_: int, backward: int, data_rank: int) -> torch.Tensor:
    """4 tokens with a loss on the first data rank, 12 on the second."""
    generator = torch.Generator().manual_seed(31 * backward + data_rank)
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    kept = ids[:, : 3 if data_rank == 0 else 7]
    return torch.cat([kept, torch.full((2, LENGTH - kept.shape[1]), -1)], 1)


def short_rank_verified(size: str, plan: mx.ParallelPlan, loss: str) -> Any:
    build = model(size)
    return verify(build, plan, loss=getattr(models, loss), batch=short_rank, windows=[1], backend="megatron", plugins=plugins())


SHORT = {
    "dp2": Plan(dp_replicate=2),
    "dp2-sharded x pp2": Plan(dp_shard=2, pp=2),
    "dp2xtp2-sp": Plan(dp_replicate=2, tp=2, sequence_parallel=True),
}


@pytest.mark.parametrize("name", SHORT)
def test_every_token_counts_the_same_on_a_short_rank(name):
    """C19: 4 and 12 tokens are divided by 16, on every rank; copies of a data rank's tokens are not counted again."""
    for loss in ("next_token_loss", "parallel_loss"):
        for outcome in run_ranks(short_rank_verified, SHORT[name].world_size, "tiny", SHORT[name], loss, reuse=True):
            assert [update.num_tokens for update in outcome.value.updates] == [16]
            assert outcome.value.passed(1e-5), outcome.value


def multi_token_update(plan: mx.ParallelPlan, loss_scale: float) -> tuple[float, list[float]]:
    rows = lambda i, data_rank: short_rank(0, i, data_rank)
    found = gradients(models.multi_token, plan, rows, models.multi_token_loss, loss_scale=loss_scale)
    return worst(found), [float(ours.norm()) for name, (ours, _) in found.items() if name.startswith("mtp.")]


MULTI_TOKEN = {"dp2": Plan(dp_replicate=2), "dp2-sharded": Plan(dp_shard=2)}


@pytest.mark.parametrize("name", MULTI_TOKEN)
def test_the_loss_of_further_tokens_has_the_same_denominator(name):
    """C19: Megatron's multi-token prediction over ranks with 4 and 12 tokens equals one process."""
    for outcome in run_ranks(multi_token_update, 2, MULTI_TOKEN[name], 1.0, reuse=True):
        error, norms = outcome.value
        assert error < 1e-5
        assert norms and all(norm > 0 for norm in norms)


def test_the_loss_of_further_tokens_follows_the_loss_scale():
    """C19: a session multiplies losses by a power of two before backward, and divides gradients by it."""
    for outcome in run_ranks(multi_token_update, 2, Plan(dp_replicate=2), 2.0**-6, reuse=True):
        assert outcome.value[0] < 1e-5


def test_multi_token_prediction_across_a_pipeline_is_refused_with_its_reason():
    """C19."""
    with pytest.raises(mx.CapabilityError, match=r"multi-token prediction across a pipeline is not supported here; set pp=1"):
        mx.explain(models.multi_token(), Plan(pp=2), backend="megatron", plugins=plugins())


def multi_token_built() -> None:
    models.multi_token(told=False)


def test_a_model_that_predicts_further_tokens_is_built_in_a_new_process():
    run_ranks(multi_token_built, 1)


# ------------------------------------------------------------------------------------------ C20: groups of one rank


SINGLE = {
    "tp2": ("tiny", Plan(tp=2, microbatches=8)),
    "pp2": ("tiny", Plan(pp=2, microbatches=8)),
    "experts of one data rank": ("tiny-moe", Plan(dp_replicate=2, ep=2, microbatches=8)),
    "tp2-sp": ("tiny-moe", Plan(tp=2, sequence_parallel=True, microbatches=8)),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_group_of_one_rank_neither_multiplies_nor_drops_microbatches(name):
    """C20: eight microbatches; the data dimension of the dense part, or of the experts, has one rank."""
    size, plan = SINGLE[name]
    for outcome in run_ranks(update_of, plan.world_size, size, plan, {}, reuse=True):
        error, ratios = outcome.value
        assert list(ratios.values()) == pytest.approx([1.0] * len(ratios), abs=1e-5)
        assert error < 1e-5

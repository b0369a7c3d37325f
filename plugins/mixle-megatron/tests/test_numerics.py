"""Every composition equals one process: gradients, norms, parameters after three AdamW updates, copies to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest
import torch

import mixle_core as mx
from mixle_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from models import verified

Plan = mx.ParallelPlan

DENSE = {
    "dp2": Plan(dp_replicate=2),
    "dp2-sharded": Plan(dp_shard=2),
    "tp2": Plan(tp=2),
    "tp2-sp": Plan(tp=2, sequence_parallel=True),
    "pp2": Plan(pp=2),
    "pp2xtp2": Plan(pp=2, tp=2),
    "pp2xtp2-sp": Plan(pp=2, tp=2, sequence_parallel=True),
    "dp2xtp2": Plan(dp_replicate=2, tp=2),
    "dp2xtp2-sp-sharded": Plan(dp_shard=2, tp=2, sequence_parallel=True),
    "dp2xpp2": Plan(dp_replicate=2, pp=2),
    "dp2xpp2-sharded": Plan(dp_shard=2, pp=2),
}
EXPERTS = {
    "ep2": Plan(dp_replicate=2, ep=2),
    "ep2-sharded": Plan(dp_shard=2, ep=2),
    "tp2-sp": Plan(tp=2, sequence_parallel=True),
    "tp2-sp-etp1": Plan(tp=2, etp=1, sequence_parallel=True),
    "ep2xtp2-sp-etp1": Plan(dp_replicate=2, tp=2, ep=2, etp=1, sequence_parallel=True),
    "ep2xtp2-sp-etp2": Plan(dp_replicate=2, tp=2, ep=2, etp=2, sequence_parallel=True),
    "ep2xtp2-sp-etp1-sharded": Plan(dp_shard=2, tp=2, ep=2, etp=1, sequence_parallel=True),
    "ep4xtp2-sp-etp1": Plan(dp_replicate=2, tp=2, ep=4, etp=1, sequence_parallel=True),
    "ep2xpp2": Plan(dp_replicate=2, pp=2, ep=2),
    "ep2xpp2-sharded": Plan(dp_shard=2, pp=2, ep=2),
    "dp2xpp2": Plan(dp_shard=2, pp=2),
}


def check(size: str, plan: Plan, *, fields: dict[str, object] | None = None, loss: str = "next_token_loss", **options: object) -> None:
    outcomes = run_ranks(verified, plan.world_size, size, plan, fields or {}, loss, options, timeout_s=180, reuse=True)
    assert all(outcome.value.updates == outcomes[0].value.updates for outcome in outcomes), "the ranks report different things"
    report = outcomes[0].value
    assert report.passed(1e-5), report
    assert [update.skipped for update in report.updates] == [None] * 3, report


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", DENSE)
def test_a_dense_model_equals_one_process(name, accumulation):
    check("tiny", attrs.evolve(DENSE[name], microbatches=accumulation))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", EXPERTS)
def test_a_model_with_experts_equals_one_process(name, accumulation):
    check("tiny-moe", attrs.evolve(EXPERTS[name], microbatches=accumulation))


@pytest.mark.parametrize("name", [name for name in DENSE if "pp" in name or "tp" in name])
def test_a_tied_embedding_equals_one_process(name):
    """Across a pipeline it lies on the first and on the last stage, and its gradient is the sum of both (C10)."""
    check("tiny-tied", attrs.evolve(DENSE[name], microbatches=2))


@pytest.mark.parametrize("name", ["tp2", "pp2xtp2-sp", "dp2-sharded"])
def test_clipping_and_windows_that_end_early(name):
    check("tiny-tied", attrs.evolve(DENSE[name], microbatches=4), windows=[4, 3, 1], max_grad_norm=0.1)


@pytest.mark.parametrize("name", ["ep2xtp2-sp-etp1-sharded", "ep2xpp2"])
def test_clipping_with_experts(name):
    check("tiny-moe", EXPERTS[name], max_grad_norm=0.1)


@pytest.mark.parametrize("name", ["tp2", "pp2xtp2-sp", "dp2xtp2-sp-sharded"])
def test_megatrons_own_loss_over_logits_that_stay_cut(name):
    check("tiny", DENSE[name], loss="parallel_loss")


# larger weights than by default: a bias starts at zero, and where its gradient is near AdamW's epsilon rounding decides the step
BIASES = {"add_bias_linear": True, "init_method_std": 0.2}
PLAIN = {"normalization": "LayerNorm", "qk_layernorm": False}


@pytest.mark.parametrize("fields", [BIASES, PLAIN], ids=["biases", "no q/k norm"])
@pytest.mark.parametrize("name", ["tp2", "tp2-sp", "pp2xtp2-sp"])
def test_biases_and_plain_attention(name, fields):
    """A row-parallel bias is complete without sequence parallelism and a term of a sum with it (C03)."""
    check("tiny", DENSE[name], fields=fields)


@pytest.mark.parametrize("name", ["tp2-sp", "ep2xtp2-sp-etp1", "ep2"])
def test_shared_experts_with_a_gate(name):
    check("tiny-moe", EXPERTS[name], fields={"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True})


@pytest.mark.parametrize("name", ["pp2", "dp2xtp2-sp-sharded"])
def test_recomputed_layers(name):
    check("tiny", attrs.evolve(DENSE[name], activation_checkpointing=True, microbatches=2))


def test_eight_processes_with_every_axis():
    check("tiny-moe", Plan(dp_shard=2, pp=2, tp=2, ep=2, etp=1, sequence_parallel=True, microbatches=2))


def test_uneven_stages():
    cut = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    uneven = {"num_layers": 3, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}
    check("tiny", Plan(pp=2, microbatches=2), fields={**cut, **uneven})
    check("tiny", Plan(tp=2), fields={**cut, **uneven})


@pytest.mark.parametrize("name", ["tp2", "tp2-sp", "dp2xtp2-sp-sharded", "pp2xtp2-sp"])
def test_dropout_leaves_copies_equal(name):
    """Masks are equal where activations are replicated and differ where they are cut; the probe accepts the first gradients."""
    fields = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    for outcome in run_ranks(verified, DENSE[name].world_size, "tiny-tied", DENSE[name], fields, "next_token_loss", {}, reuse=True):
        assert all(update.copies_equal for update in outcome.value.updates)
        assert outcome.value.updates[0].gradient_error > 1e-3  # the masks are drawn


ROUTING = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "z loss": {"moe_z_loss_coeff": 0.1},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
}


@pytest.mark.parametrize("name", ["ep2", "dp2xpp2"])
@pytest.mark.parametrize("kind", ["aux_loss", "z loss", "capacity"])
def test_what_routers_add_and_drop_where_each_rank_sees_whole_rows(kind, name):
    check("tiny-moe", EXPERTS[name], fields=ROUTING[kind])


@pytest.mark.parametrize("name", ["ep2", "tp2-sp"])
def test_the_other_token_dispatcher(name):
    check("tiny-moe", EXPERTS[name], fields=ROUTING["allgather"])


def test_an_output_gate_of_attention():
    check("tiny", DENSE["tp2"], fields={"attention_output_gate": True})

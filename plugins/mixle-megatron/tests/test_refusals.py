"""What is refused: one line that names the cause and the way out, on every rank, before anything trains."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mixle_core as mx
from mixle_core.runtime import attach
from mixle_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
import models
from models import batch, model, next_token_loss, plugins

Plan = mx.ParallelPlan
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def plain_model(**fields: Any) -> nn.Module:
    return nn.Linear(4, 4)


def grouped_experts(**fields: Any) -> nn.Module:
    """Experts of one layer in one tensor, as Megatron's grouped ones have them; those need a package for GPUs."""
    from mixle_megatron.spec import local_block_spec

    class Grouped(nn.Module):
        def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.is_expert = True
            self.weight1 = nn.Parameter(torch.empty(config.hidden_size, num_local_experts * 64))
            self.weight1.allreduce = config.expert_model_parallel_size == 1

    def spec(config: Any, stage: int = 0) -> Any:
        block = local_block_spec(config, stage)
        for layer in block.layer_specs:
            layer.submodules.mlp.submodules.experts = Grouped
        return block

    return model("tiny-moe", block_spec=spec, **fields)()


class WithoutTransformerEngine:
    """What no layer is an instance of."""


def latent_attention(**fields: Any) -> nn.Module:
    """Multi-latent attention, with Megatron's own spec."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from mixle_megatron.model import MegatronModel
    from mixle_megatron.spec import RMSNorm

    # 0.16.1 reads a name of Transformer Engine, and passes two sizes that only its attention takes, where there is none of it
    multi_latent_attention.TELinear = WithoutTransformerEngine

    class WithChannels(DotProductAttention):
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope"}
    config = MLATransformerConfig(
        **sizes,
        **latent,
        multi_latent_attention=True,
        qk_layernorm=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )

    def provider(config: Any, *, pre_process: bool, post_process: bool, pg_collection: Any) -> nn.Module:
        layer = get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True, normalization="RMSNorm")
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        parts.self_attention.submodules.core_attention = WithChannels
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.kv_layernorm = RMSNorm
        return GPTModel(
            config=config,
            transformer_layer_spec=layer,
            vocab_size=64,
            max_sequence_length=32,
            pre_process=pre_process,
            post_process=post_process,
            position_embedding_type="rope",
            pg_collection=pg_collection,
        )

    return MegatronModel(config, provider)


def virtual_pipeline(**fields: Any) -> nn.Module:
    shell = model("tiny", **fields)()
    shell.base_config.virtual_pipeline_model_parallel_size = 2
    return shell


SPLIT = Plan(tp=2, sequence_parallel=True)
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


def balanced(kind: str) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}


PLAIN = {
    "cp": (
        "tiny",
        Plan(cp=2),
        {},
        mx.CapabilityError,
        "Megatron-Core refuses to build this model under cp=2: Context parallelism is only supported by TEDotProductAttention",
    ),
    "both data axes": (
        "tiny",
        Plan(dp_replicate=2, dp_shard=2),
        {},
        mx.MixleError,
        (
            "dp_replicate and dp_shard above 1 are several instances of Megatron's distributed optimizer, unverified without CUDA; "
            "put all data ranks on dp_shard"
        ),
    ),
    "bf16": (
        "tiny",
        Plan(tp=2, precision="bf16"),
        {},
        mx.MixleError,
        (
            "precision=bf16: Megatron's linear layers keep fp32 weights and bf16 activations apart only under CUDA autocast, so this is "
            "unverified; use precision='fp32'"
        ),
    ),
    "another kind of model": (
        "plain_model",
        Plan(tp=2),
        {},
        mx.CapabilityError,
        "backend megatron needs a MegatronModel, whose layers are Megatron-Core's own; build the model with mixle_megatron.MegatronModel",
    ),
    "another kind of model, data parallel": (
        "plain_model",
        Plan(dp_replicate=2),
        {},
        mx.MixleError,
        "backend megatron needs a MegatronModel, whose layers are Megatron-Core's own; build the model with mixle_megatron.MegatronModel",
    ),
    **{
        name: (size, plan, fields, mx.MixleError, text)
        for name, size, plan, fields, text in [
            (
                "half-precision parameters",
                "tiny",
                Plan(dp_shard=2),
                {"params_dtype": torch.bfloat16},
                "is torch.bfloat16: parameters",
            ),
            ("the flag bf16", "tiny", Plan(tp=2), {"bf16": True}, "config.bf16=True: parameters in half precision"),
            ("its own recomputation", "tiny", Plan(tp=2), RECOMPUTED, "recompute_granularity='full': Megatron's own recomputation"),
            ("dropout and recomputation", "tiny", Plan(tp=2, activation_checkpointing=True), {"hidden_dropout": 0.1}, "draw other masks"),
            ("aux_loss on tp", "tiny-moe", SPLIT, balanced("aux_loss"), "aux_loss with tp=2: Megatron 0.16 divides it by tp twice"),
            ("seq_aux_loss on tp", "tiny-moe", SPLIT, balanced("seq_aux_loss"), "seq_aux_loss with tp=2: Megatron 0.16 divides it by"),
            ("z loss on tp", "tiny-moe", SPLIT, {"moe_z_loss_coeff": 0.1}, "moe_z_loss_coeff with tp=2: Megatron 0.16 divides it by tp"),
            ("global_aux_loss", "tiny-moe", Plan(dp_replicate=2), balanced("global_aux_loss"), "global_aux_loss weighs tokens of all data"),
            ("capacity on tp", "tiny-moe", SPLIT, {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor with tp=2"),
            (
                "expert bias",
                "tiny-moe",
                Plan(dp_replicate=2),
                BIASED,
                "moe_router_enable_expert_bias=True moves the router by token counts",
            ),
        ]
    },
    "virtual pipeline": (
        "virtual_pipeline",
        Plan(pp=2),
        {},
        mx.CapabilityError,
        "virtual_pipeline_model_parallel_size is set, and interleaved schedules are not driven here; leave it None",
    ),
    "ep without experts": (
        "tiny",
        Plan(dp_replicate=2, ep=2),
        {},
        mx.CapabilityError,
        "num_moe_experts must be non None to use expert-parallel",
    ),
    "ep that does not divide the experts": (
        "tiny-moe",
        Plan(dp_replicate=3, ep=3),
        {},
        mx.CapabilityError,
        "4 experts are not divided by ep=3; choose ep from the divisors of 4",
    ),
    "heads that tp does not divide": ("tiny", Plan(tp=3), {}, mx.CapabilityError, "num_attention_heads (4) must be a multiple of"),
    "query groups that tp does not divide": ("tiny", Plan(tp=4), {}, mx.CapabilityError, "has 2 query groups, which tp=4 does not divide"),
    "grouped experts": (
        "grouped_experts",
        Plan(dp_replicate=2, ep=2),
        {},
        mx.CapabilityError,
        "weight1 holds several experts in one tensor, which is not cut over ep here; use moe_grouped_gemm=False",
    ),
    "further tokens across a pipeline": (
        "multi_token",
        Plan(pp=2),
        {},
        mx.CapabilityError,
        "multi-token prediction across a pipeline is not supported here; set pp=1, or mtp_num_layers=None",
    ),
    "latent attention": (
        "latent_attention",
        Plan(tp=2),
        {},
        mx.CapabilityError,
        (
            "whether a norm of latent attention sees split activations depends on where it stands, and nothing says it; not supported with "
            "tp above 1: set tp=1"
        ),
    ),
    "more stages than layers": ("tiny", Plan(pp=3), {}, mx.CapabilityError, "Megatron-Core refuses pp=3 for 2 layers"),
}


def built(what: str, fields: dict[str, Any]) -> Any:
    maker = globals().get(what) or getattr(models, what, None)
    return maker(**fields) if maker else model(what, **fields)()


@pytest.mark.parametrize("name", PLAIN)
def test_a_plan_that_is_not_served_is_refused_before_any_process_starts(name):
    what, plan, fields, error, text = PLAIN[name]
    with pytest.raises(error) as refused:
        mx.explain(built(what, fields), plan, backend="megatron", plugins=plugins())
    assert text in str(refused.value)


def attached(what: str, plan: mx.ParallelPlan, fields: dict[str, Any]) -> None:
    attach(built(what, fields), plan, backend="megatron", seed=0, plugins=plugins()).close()


@pytest.mark.parametrize("name", ["cp", "another kind of model", "virtual pipeline", "further tokens across a pipeline"])
def test_it_is_refused_alike_on_every_rank(name):
    what, plan, fields, error, text = PLAIN[name]
    started = time.monotonic()
    outcomes = run_ranks(attached, plan.world_size, what, plan, fields, check=False, timeout_s=20)
    assert time.monotonic() - started < 20
    assert [outcome.error for outcome in outcomes] == [error.__name__] * plan.world_size, outcomes[0].trace
    assert all(text in outcome.message for outcome in outcomes)


# ----------------------------------------------------------------------------------------------------- providers


def ignoring(argument: str) -> Any:
    """A model whose provider ignores what it is given as `argument`."""
    from mixle_megatron.groups import lone_groups

    shell = model("tiny")()
    inner, config = shell.provider, shell.base_config
    own = {"config": config, "pg_collection": lone_groups()}[argument]
    shell.provider = lambda **arguments: inner(**{**arguments, argument: own})
    return shell


def attached_ignoring(argument: str, plan: mx.ParallelPlan) -> None:
    attach(ignoring(argument), plan, backend="megatron", seed=0, plugins=plugins()).close()


@pytest.mark.parametrize("argument", ["pg_collection", "config"])
def test_a_provider_that_does_not_follow_its_arguments_is_named_with_a_parameter(argument):
    plan = Plan(pp=2) if argument == "config" else Plan(tp=2)
    for outcome in run_ranks(attached_ignoring, 2, argument, plan, check=False, timeout_s=20):
        assert "the provider must follow config and groups" in outcome.message, outcome.trace
        assert ".weight is " in outcome.message
        assert outcome.error in ("PluginError", "UsageError")


# ------------------------------------------------------------------------------------------------------ training


def trained_outside() -> None:
    reduction = attach(model("tiny")(), Plan(pp=2), backend="megatron", seed=0, plugins=plugins())
    next_token_loss(reduction.module, batch(0, 0, 0))


def odd_rows() -> None:
    plan = Plan(tp=2, sequence_parallel=True)
    reduction = attach(model("tiny")(), plan, backend="megatron", seed=0, plugins=plugins())
    reduction.run([batch(0, 0, 0)[:, :7]], next_token_loss)


def watched() -> None:
    attach(model("tiny")(), Plan(dp_replicate=2), backend="megatron", seed=0, plugins=plugins(), strict=True)


def prepared(optimizer: Any) -> Any:
    plan = Plan(dp_shard=2)
    return mx.prepare(model("tiny")(), plan, loss=next_token_loss, optimizer=optimizer, backend="megatron", plugins=plugins())


def with_sgd() -> None:
    prepared(partial(torch.optim.SGD, lr=1e-3))


def with_routes() -> None:
    prepared({"decoder.**": ADAMW, "{embedding,output_layer}.**": ADAMW})


def with_an_optimizer_of_its_own() -> int:
    """How many updates a loop of its own makes before it is stopped, if it is."""
    reduction = attach(model("tiny")(), Plan(dp_shard=2), backend="megatron", seed=0, plugins=plugins())
    optimizer = ADAMW([parameter for _, parameter in reduction.named_parameters()])
    for update in range(3):
        try:
            loss, tokens = next_token_loss(reduction.module, batch(update, 0, reduction.mesh.rank))
        except mx.UsageError:
            assert update == 1, update
            raise
        loss.backward()
        reduction.finish(tokens, float(loss))
        optimizer.step()
        reduction.zero()
    return update


def called_twice() -> None:
    """A loss over two forwards of one microbatch: the last stage would take the first one's input again."""

    def twice(module, ids):
        (first, tokens), (second, _) = next_token_loss(module, ids), next_token_loss(module, ids)
        return first + second, tokens

    reduction = attach(model("tiny")(), Plan(pp=2), backend="megatron", seed=0, plugins=plugins())
    reduction.run([batch(0, 0, 0)], twice)


def test_a_loss_that_calls_the_module_twice_across_a_pipeline_is_refused_and_nobody_waits():
    started = time.monotonic()
    first, last = run_ranks(called_twice, 2, check=False, timeout_s=20)
    assert time.monotonic() - started < 20
    assert last.error == "UsageError"
    assert "the loss called the module twice in one microbatch; across a pipeline it may call it once" in last.message
    assert first.error == "RuntimeError"  # its peer has gone


IN_TRAINING = {
    "strict": (
        watched,
        "CapabilityError",
        "strict: megatron does not announce its collectives (Mesh.announce), so they cannot be compared",
    ),
    "a pipeline outside its schedule": (trained_outside, "UsageError", "a pipeline's stages train together: through a session, or through"),
    "rows that tp does not divide": (odd_rows, "UsageError", "rows of 7 positions; with sequence_parallel expected a multiple of tp=2"),
    "an optimizer that cannot be sharded": (
        with_sgd,
        "CapabilityError",
        "SGD with dp_shard above 1: Megatron's distributed optimizer refuses it",
    ),
    "routes with sharded state": (
        with_routes,
        "CapabilityError",
        "Megatron's distributed optimizer shards all of them together; use one optimizer for all, or dp_replicate instead of dp_shard",
    ),
    "an optimizer over the parameters themselves": (
        with_an_optimizer_of_its_own,
        "UsageError",
        "dp_shard above 1 shards the optimizer's state with Megatron's own; make it with reduction.build_optimizer(factory)",
    ),
}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_training_that_would_go_wrong_stops_on_every_rank(name):
    function, error, text = IN_TRAINING[name]
    started = time.monotonic()
    outcomes = run_ranks(function, 2, check=False, timeout_s=20)
    assert time.monotonic() - started < 20
    assert [outcome.error for outcome in outcomes] == [error] * 2, outcomes[0].trace
    assert all(text in outcome.message for outcome in outcomes), outcomes[0].message


# ------------------------------------------------------------------------------------------- versions and names


@pytest.mark.parametrize("found", ["0.15.3", "0.17.0", "1.0"])
def test_another_version_of_the_library_is_refused_by_its_number(monkeypatch, found):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found if name == "megatron-core" else real(name))
    with pytest.raises(
        mx.CapabilityError, match=rf"megatron-core {found}: this plugin was read against 0.16; install 'megatron-core>=0.16.1"
    ):
        model("tiny")()


def test_a_missing_library_is_said_with_the_command_to_install_it(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(mx.CapabilityError, match=r"megatron-core is not installed; pip install 'megatron-core>=0.16.1,<0.17'"):
        model("tiny")()


def test_a_model_of_an_unknown_size_lists_those_there_are():
    from mixle_core.runtime import model_builder

    with pytest.raises(mx.UsageError, match=r"megatron-gpt:x: expected one of tiny, tiny-tied, tiny-moe, demo, demo-moe"):
        model_builder("megatron-gpt:x", what="--model")[1]()

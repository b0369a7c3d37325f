"""The functions for Megatron Bridge, on a real TransformerConfig and on configurations that lack what a plan needs."""

from __future__ import annotations

import types

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

import mixle_core as mx

Plan = mx.ParallelPlan


@pytest.fixture
def backend() -> mx.runtime.TrainingBackend:
    return mx.get_training_backend("megatron")


def provider() -> TransformerConfig:
    return TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)


def container(**train: int) -> types.SimpleNamespace:
    """As Bridge's, of Megatron-Core's own parts."""
    return types.SimpleNamespace(
        model=provider(),
        ddp=DistributedDataParallelConfig(average_in_collective=True),
        optimizer=OptimizerConfig(),
        train=types.SimpleNamespace(**{"micro_batch_size": 2, "global_batch_size": 16, **train}),
    )


def test_the_sizes_of_the_plan_are_set_on_a_real_config(backend):
    plan = Plan(pp=2, dp_shard=4, cp=2, tp=2, ep=4, etp=1, sequence_parallel=True, activation_checkpointing=True)
    config = backend.configure_provider(provider(), plan)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size) == (2, 2, 2)
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 1)
    assert (config.sequence_parallel, config.calculate_per_token_loss, config.pipeline_dtype) == (True, True, torch.float32)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == ("full", "uniform", 1)
    config.num_moe_experts = 4
    config.__post_init__()  # Megatron's own checks accept it


@pytest.mark.parametrize(
    ("plan", "attribute", "why"),
    [
        (Plan(dp_shard=2, cp=2), "context_parallel_size", "cp=2"),
        (Plan(dp_shard=2, ep=2), "expert_model_parallel_size", "ep=2"),
        (Plan(tp=2, sequence_parallel=True), "sequence_parallel", "sequence_parallel=True"),
        (Plan(dp_shard=2, activation_checkpointing=True), "recompute_method", "activation_checkpointing=True"),
        (Plan(dp_shard=2), "calculate_per_token_loss", "a mean over all tokens"),
    ],
    ids=["cp", "ep", "sequence parallel", "recomputation", "token mean"],
)
def test_what_a_provider_cannot_take_is_refused_and_nothing_is_set(backend, plan, attribute, why):
    lacking = types.SimpleNamespace(**{name: value for name, value in vars(provider()).items() if name != attribute})
    before = dict(vars(lacking))
    with pytest.raises(mx.CapabilityError, match=f"has no attribute '{attribute}', which {why} needs; nothing was set"):
        backend.configure_provider(lacking, plan)
    assert vars(lacking) == before


def test_the_distributed_optimizer_follows_dp_shard(backend):
    config = backend.configure_distributed_optimizer(container(), Plan(dp_shard=2))
    assert (config.ddp.use_distributed_optimizer, config.optimizer.use_distributed_optimizer) == (True, True)
    assert (config.ddp.average_in_collective, config.ddp.grad_reduce_in_fp32) == (False, True)
    config = backend.configure_distributed_optimizer(container(), Plan(dp_replicate=2))
    assert (config.ddp.use_distributed_optimizer, config.optimizer.use_distributed_optimizer) == (False, False)
    config = backend.configure_distributed_optimizer(container(), Plan(dp_replicate=2, dp_shard=2))
    assert config.ddp.num_distributed_optimizer_instances == 2


def test_a_configuration_without_an_optimizer_is_refused_and_keeps_its_values(backend):
    config = types.SimpleNamespace(ddp=DistributedDataParallelConfig(average_in_collective=True))
    with pytest.raises(mx.CapabilityError, match="optimizer is missing, which dp_shard=2 needs"):
        backend.configure_distributed_optimizer(config, Plan(dp_shard=2))
    assert config.ddp.average_in_collective is True


def test_bridges_loop_is_refused_where_it_cannot_be_imported(backend):
    with pytest.raises(mx.CapabilityError, match="run_pretrain needs Megatron Bridge, which cannot be imported here"):
        backend.run_pretrain(container(), None, plan=Plan(dp_shard=2))


def bridge(monkeypatch, seen: list[object]) -> None:
    """The one name of Bridge that run_pretrain calls; Bridge itself needs Transformer Engine to be imported."""
    module = types.ModuleType("megatron.bridge.training.pretrain")
    module.pretrain = lambda config, forward_step: seen.append((config, forward_step)) or "trained"
    for name in ("megatron.bridge", "megatron.bridge.training"):
        monkeypatch.setitem(__import__("sys").modules, name, types.ModuleType(name))
    monkeypatch.setitem(__import__("sys").modules, "megatron.bridge.training.pretrain", module)


def test_bridges_loop_gets_the_configuration_of_the_plan(backend, monkeypatch):
    seen: list[object] = []
    bridge(monkeypatch, seen)
    config = container()
    plan = Plan(dp_shard=2, tp=2, microbatches=4)
    assert backend.run_pretrain(config, "step", plan=plan) == "trained"
    assert seen == [(config, "step")]
    assert (config.model.tensor_model_parallel_size, config.ddp.use_distributed_optimizer) == (2, True)


def test_batch_sizes_that_are_not_the_plans_are_refused_before_anything_is_set(backend, monkeypatch):
    bridge(monkeypatch, [])
    config = container(global_batch_size=12)
    with pytest.raises(mx.CapabilityError, match=r"global_batch_size=12: the plan has 2 data ranks with 4 backwards .*; expected 16"):
        backend.run_pretrain(config, "step", plan=Plan(dp_shard=2, tp=2, microbatches=4))
    assert config.model.tensor_model_parallel_size == 1
    with pytest.raises(mx.CapabilityError, match="has no attribute 'mixed_precision', which precision=bf16 needs"):
        backend.run_pretrain(container(), "step", plan=Plan(dp_shard=2, microbatches=4, precision="bf16"))


def test_labels(backend):
    assert backend.label == "megatron"
    assert backend.prepare.keywords == {"backend": "megatron"}
    with pytest.raises(mx.CapabilityError, match="backend megatron has no pretrain; it has prepare, attach, explain"):
        backend.pretrain  # noqa: B018
    with pytest.raises(mx.CapabilityError, match="backend 'megatrom': expected one of megatron"):
        mx.get_training_backend("megatrom")

"""What the plugin answers for other models, what it imports, how fast a large table is, and training under a double."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from mixle_qwen3.build import build
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from mixle_core import AxisClaim, ParallelPlan, explain, hookimpl, load_plugins
from mixle_core.audit import verify
from mixle_core.testing import OwnsEverything, next_token_loss, run_ranks, token_batch

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


class Executes:
    """Claims tp, so that a table can be made; nothing is ever executed."""

    @hookimpl
    def own_axis(self, plan, layouts):
        return AxisClaim(axis="tp", executor=lambda: None, backend="double")


def with_doubles():
    return load_plugins(["qwen3"], extra={"double": OwnsEverything(), "tp": Executes()})


class Odd(nn.Module):
    """A module whose `config` is no config of transformers."""

    def __init__(self, config):
        super().__init__()
        self.config = config


OTHERS = {
    "plain": lambda: nn.Linear(4, 4),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, num_key_value_heads=2, num_experts=2, moe_intermediate_size=8)),
    "config-is-a-dict": lambda: Odd({"model_type": "qwen3"}),
    "no-module": object,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_declined(name):
    with torch.device("meta"):
        model = OTHERS[name]()
    plugins = load_plugins(["qwen3"])
    assert plugins.ask_one("qwen3", "declare_layout", model=model, plan=ParallelPlan(tp=2), declared={}) is None


def test_a_qwen3_model_is_not_declined():
    plugins = load_plugins(["qwen3"])
    layout = plugins.ask_one("qwen3", "declare_layout", model=build("tiny"), plan=ParallelPlan(tp=2), declared={})
    assert layout.axis == "tp" and layout.units == ("model.layers.*",)


LAZY = """
import sys
from types import SimpleNamespace
import mixle_core as mx

def loaded():
    print(*[name for name in ("mixle_qwen3.plugin", "mixle_qwen3.layout", "torch", "transformers") if name in sys.modules])

mx.installed_plugins()
loaded()
plugins = mx.load_plugins(["qwen3"])
plan = mx.ParallelPlan(tp=2)
llama = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
assert plugins.ask_one("qwen3", "declare_layout", model=llama, plan=plan, declared={}) is None
loaded()
plugins.ask_one("qwen3", "build_model", spec="tiny")
loaded()
"""


def test_listing_imports_nothing_and_loading_neither_torch_nor_transformers():
    env = {**os.environ, "MIXLE_PLUGINS": "qwen3"}
    result = subprocess.run([sys.executable, "-c", LAZY], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    listed, asked, built = result.stdout.split("\n")[:3]
    assert listed == ""
    assert asked == "mixle_qwen3.plugin"
    assert built.split() == ["mixle_qwen3.plugin", "torch", "transformers"]


def test_the_table_of_405_billion_parameters_on_512_ranks_takes_less_than_a_second():
    model, plan, plugins = build("405b"), ParallelPlan(dp_shard=64, tp=8), with_doubles()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        table = explain(model, plan, plugins=plugins)
        seconds.append(time.perf_counter() - started)
    assert len(table) == 126 * 11 + 3
    assert sum(row.payload_bytes for row in table.rows) > 405e9 * 4 / 8
    assert min(seconds) < 1.0, seconds


def test_the_table_says_how_each_kind_of_parameter_is_reduced():
    table = explain(build("tiny"), ParallelPlan(dp_shard=2, tp=2), plugins=with_doubles())
    pending = {row.name.removeprefix("model.layers.0."): row.pending for row in table.rows}
    assert pending["self_attn.q_norm.weight"] == ("dp_shard", "tp")
    assert pending["self_attn.q_proj.weight"] == ("dp_shard",)
    reduced = {row.name.removeprefix("model.layers.0."): row.reduced for row in table.rows}
    assert reduced["input_layernorm.weight"] == ("dp_shard",) and reduced["self_attn.k_norm.weight"] == ("dp_shard", "tp")


def verify_on_rank(size, plan):
    build_it = lambda: build(size)
    plugins = {"double": OwnsEverything()}
    return verify(build_it, plan, loss=next_token_loss, batch=token_batch, windows=[2, 1], max_grad_norm=0.05, plugins=plugins)


@pytest.mark.parametrize("size", ["tiny", "tiny-tied"])
def test_data_parallel_training_from_meta_equals_one_process(size):
    plan = ParallelPlan(dp_replicate=2, gradient_accumulation_steps=2, activation_checkpointing=True)
    for outcome in run_ranks(verify_on_rank, 2, size, plan, env={"MIXLE_PLUGINS": "qwen3"}, timeout_s=60):
        assert outcome.value.passed(1e-5), outcome.value

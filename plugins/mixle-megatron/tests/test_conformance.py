"""The plugins keep every rule of the conformance suite that has an object in them."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from mixle_core import ParallelPlan
from mixle_core.testing import PluginConformance


class TestMegatron(PluginConformance):
    """Layout, executor, owner and state of a small GPT."""

    plugin_name = "megatron"
    beside = ("megatron-gpt",)
    sizes: ClassVar = {"tp": (2,), "pp": (2,)}
    plans = (ParallelPlan(), ParallelPlan(dp_replicate=2), ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(dp_shard=2, tp=2))

    def make_model(self) -> nn.Module:
        return small()


class TestMegatronGPT(PluginConformance):
    """Names of models and their initial values, with the other half of the distribution beside it."""

    plugin_name = "megatron-gpt"
    beside = ("megatron",)
    plans = (ParallelPlan(), ParallelPlan(tp=2), ParallelPlan(dp_replicate=2, tp=2))

    def make_model(self) -> nn.Module:
        return small()


def small(**fields: Any) -> nn.Module:
    """The smallest named size, with few tokens."""
    from mixle_megatron.gpt import SIZES, gpt

    model: nn.Module = gpt(**{**SIZES["tiny"], "vocab_size": 64, **fields})
    return model

"""Plugins that need others beside them keep the rules that they cannot show alone."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from mixle_core import ParallelPlan
from mixle_core.testing import PluginConformance


class TestQwen3(PluginConformance):
    """With an executor of tp."""

    plugin_name = "qwen3"
    beside = ("dtensor-tp",)

    def make_model(self) -> nn.Module:
        from mixle_qwen3.build import build

        return build("tiny")

    def make_tied_model(self) -> nn.Module:
        from mixle_qwen3.build import build

        return build("tiny-tied")


class TestTorchDDPWithTP(PluginConformance):
    """Sums over dp_replicate and tp together."""

    plugin_name = "torch-ddp"
    beside = ("dtensor-tp",)
    plans = (ParallelPlan(dp_replicate=2, tp=2),)


class TestTorchFSDP2WithTP(PluginConformance):
    """Sums shards over tp."""

    plugin_name = "torch-fsdp2"
    beside = ("dtensor-tp",)
    plans = (ParallelPlan(dp_shard=2, tp=2),)
    unsupported: ClassVar = {"owner_removes_its_hooks": "fully_shard cannot be taken back: parameters stay sharded and its hooks stay"}

"""The layout keeps every rule of the conformance suite that needs no executor of tp; tests/matrix has those that do."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from mixle_core import ParallelPlan
from mixle_core.testing import PluginConformance


class TestQwen3(PluginConformance):
    """Alone, so that only plans without tp can run."""

    plugin_name = "qwen3"
    plans = (ParallelPlan(), ParallelPlan(dp_replicate=2), ParallelPlan(dp_replicate=4))
    unsupported: ClassVar = {"plans_reach_the_plugin": "no executor of tp is installed here; tests/matrix/test_conformance.py has one"}

    def make_model(self) -> nn.Module:
        from mixle_qwen3.build import build

        return build("tiny")

    def make_tied_model(self) -> nn.Module:
        from mixle_qwen3.build import build

        return build("tiny-tied")

"""The plugin keeps every rule of the conformance suite that has an object in it."""

from __future__ import annotations

from typing import ClassVar

from mixle_core import ParallelPlan
from mixle_core.testing import PluginConformance


class TestTorchFSDP2(PluginConformance):
    """On data axes alone; the matrix has it beside an executor of tp."""

    plugin_name = "torch-fsdp2"
    plans = (ParallelPlan(dp_shard=2), ParallelPlan(dp_replicate=2, dp_shard=2), ParallelPlan(dp_shard=4))
    unsupported: ClassVar = {"owner_removes_its_hooks": "fully_shard cannot be taken back: parameters stay sharded and its hooks stay"}

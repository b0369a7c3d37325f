"""The plugin keeps every rule of the conformance suite that has an object in it."""

from __future__ import annotations

from mixle_core import ParallelPlan
from mixle_core.testing import PluginConformance


class TestDTensorTP(PluginConformance):
    """As executor and owner of tp alone, and as executor beside an owner of the data axis."""

    plugin_name = "dtensor-tp"
    plans = (
        ParallelPlan(),
        ParallelPlan(tp=2),
        ParallelPlan(tp=2, sequence_parallel=True),
        ParallelPlan(tp=4),
        ParallelPlan(dp_replicate=2, tp=2),
    )

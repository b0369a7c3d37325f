"""The plugin keeps every rule of the conformance suite that has an object in it."""

from __future__ import annotations

from mixle_core.testing import PluginConformance


class TestTorchDDP(PluginConformance):
    """On dp_replicate alone; the matrix has it beside an executor of tp."""

    plugin_name = "torch-ddp"

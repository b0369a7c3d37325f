"""The plugin refuses every plan, and does so as the conformance suite asks."""

from __future__ import annotations

from typing import ClassVar

from mixle_core.testing import PluginConformance


class TestMegatronFSDP(PluginConformance):
    """Refusals only."""

    plugin_name = "megatron-fsdp"
    plans = ()
    unsupported: ClassVar = {"plans_reach_the_plugin": "it never claims: every plan is refused with what was measured"}

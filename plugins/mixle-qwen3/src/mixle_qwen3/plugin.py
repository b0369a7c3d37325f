"""The hooks: what a Qwen3 model is on the tp axis, and how to build one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixle_core import ModelLayout, ParallelPlan, Role, hookimpl


@hookimpl
def declare_layout(model: Any, plan: ParallelPlan, declared: Mapping[str, Mapping[str, Role]]) -> ModelLayout | None:
    """Declare a dense Qwen3 model of transformers, with or without its language-model head."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "qwen3":
        return None
    from mixle_qwen3.layout import qwen3_layout

    return qwen3_layout(model, config, plan)


@hookimpl
def build_model(spec: str) -> Any:
    """Build `tiny`, `demo`, `0.6b`, `32b`, `405b`, or read a local transformers directory."""
    from mixle_qwen3.build import build

    return build(spec)

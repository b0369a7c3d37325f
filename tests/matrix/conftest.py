"""Ranks start with the models imported: every test here needs them."""

from mixle_core.testing import preload

preload("transformers.models.qwen3.modeling_qwen3")

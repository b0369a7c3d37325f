"""Ranks start with Megatron-Core imported: every test here needs it."""

from mixle_core.testing import preload

preload("pytest", "mixle_megatron.reduction", "mixle_megatron.axis", "mixle_megatron.gpt", "mixle_megatron.spec", "mixle_lm")
preload("megatron.core.models.gpt.gpt_model", "megatron.core.transformer.moe.moe_layer", "megatron.core.distributed")
preload("megatron.core.optimizer", "megatron.core.pipeline_parallel")

"""Ranks start with the models and the plugins imported: every test here needs them. And with pytest, for the modules of the tests."""

from mixle_core.testing import preload

preload("transformers.models.qwen3.modeling_qwen3", "pytest", "mixle_qwen3.plugin", "mixle_qwen3.build", "mixle_qwen3.layout")
preload("mixle_torch_ddp.reduction", "mixle_torch_fsdp2.reduction", "mixle_dtensor_tp.axis", "mixle_dtensor_tp.reduction")

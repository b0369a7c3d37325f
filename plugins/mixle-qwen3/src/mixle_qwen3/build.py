"""Qwen3 models by size, on meta, or from a local transformers directory with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mixle_core import UsageError


def _size(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "use_cache": False,
    }


SIZES = {
    "tiny": _size(256, 64, 128, 2, 4, 2, 16, tied=False),
    "tiny-tied": _size(256, 64, 128, 2, 4, 2, 16, tied=True),
    "demo": _size(256, 192, 480, 3, 6, 2, 32, tied=True),
    "0.6b": _size(151936, 1024, 3072, 28, 16, 8, 128, tied=True),
    "32b": _size(151936, 5120, 25600, 64, 64, 8, 128, tied=False),
    "405b": _size(128256, 16384, 53248, 126, 128, 8, 128, tied=False),
}
"""The published 0.6B and 32B shapes, a 405B one, and small ones over bytes."""


def build(spec: str) -> Any:
    """The model of one of `SIZES` on meta, or that of a local directory with its values (each rank reads it whole).

    Raises:
        UsageError: neither a size nor a readable directory of a Qwen3 model.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if spec in SIZES:
        with torch.device("meta"):
            return Qwen3ForCausalLM(Qwen3Config(**SIZES[spec]))
    if not (Path(spec) / "config.json").is_file():
        raise UsageError(f"qwen3:{spec} is neither a size ({', '.join(SIZES)}) nor a directory with a config.json")
    return _read(spec)


def _read(directory: str) -> Any:
    import torch
    from safetensors import SafetensorError
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model, report = None, {}
    try:
        kind = Qwen3Config.get_config_dict(directory, local_files_only=True)[0].get("model_type")
        if kind == "qwen3":
            model, report = Qwen3ForCausalLM.from_pretrained(
                directory, local_files_only=True, dtype=torch.float32, use_cache=False, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"{directory} could not be read as a Qwen3 model: {' '.join(str(error).split())[:200]}") from error
    if model is None:
        raise UsageError(f"{directory} holds a {kind!r} model; expected 'qwen3'")
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would draw them at random, differently on each rank
        raise UsageError(f"{directory} lacks {len(missing)} weights of a Qwen3 model with its head, such as {missing[0]}")
    return model.train()

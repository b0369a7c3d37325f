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
    try:
        config = Qwen3Config.from_pretrained(spec, local_files_only=True)
        if config.model_type != "qwen3":
            raise UsageError(f"{spec} holds a {config.model_type!r} model; expected 'qwen3'")
        return Qwen3ForCausalLM.from_pretrained(spec, config=config, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UsageError(f"{spec} could not be read as a Qwen3 model: {' '.join(str(error).split())[:200]}") from error

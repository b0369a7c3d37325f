"""Qwen3 in one process, and as transformers parallelises it over tp."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def reference() -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).float()


def parallel(tp: int, dp: int) -> nn.Module:
    """Read by transformers with its tensor-parallel plan, and sharded over the data ranks where there are any."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=tp, fsdp_size=dp) if dp > 1 else DistributedConfig(tp_size=tp)
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place, src=0)
    folder = Path(str(place[0])) / "qwen3"
    if dist.get_rank() == 0:
        reference().save_pretrained(folder)
    dist.barrier()
    return Qwen3ForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32)

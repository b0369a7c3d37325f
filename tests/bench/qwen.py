"""The model that is timed, its batches and loss, and what one fp32 process computes for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "bench": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}
SIZES["bench of 4"] = SIZES["bench"]
ROWS = {"tiny": (2, 16), "bench": (4, 96), "bench of 4": (2, 96)}
"""Rows and tokens of a batch, per data rank. Four processes share the cores of two, and a step stays between 50 and 200 ms."""


def build(size: str) -> Qwen3ForCausalLM:
    """Equal values wherever it is built; norms differ from one, or a wrong gradient of theirs would change little."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES[size], tie_word_embeddings=False, use_cache=False)).float()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.train()


def batch(size: str, number: int, data_rank: int) -> torch.Tensor:
    """Ids of shape [rows, tokens], the same wherever they are drawn."""
    generator = torch.Generator().manual_seed(1 + 101 * number + data_rank)
    return torch.randint(SIZES[size]["vocab_size"], ROWS[size], generator=generator)


def summed_loss(module: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token loss and its number of tokens."""
    logits = module(input_ids=ids).logits
    targets = ids[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum"), targets.numel()


def reference_gradients(size: str, numbers: list[int], data_size: int) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over the batches of all data ranks, in one process."""
    model = build(size)
    total = 0
    for number in numbers:
        for data_rank in range(data_size):
            loss, tokens = summed_loss(model, batch(size, number, data_rank))
            loss.backward()
            total += tokens
    return {name: parameter.grad / total for name, parameter in model.named_parameters()}

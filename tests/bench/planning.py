"""How long the plan and table of a large model take, and how much memory: run as a program, once per model."""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, vocab: int = 151936) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    }


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "8B": ("Qwen3", qwen3(4096, 12288, 36, 32), {"dp_shard": 8, "tp": 8}),
    "70B": ("Qwen3", qwen3(8192, 28672, 80, 64), {"dp_shard": 64, "tp": 8}),
    "405B": ("Qwen3", qwen3(16384, 53248, 126, 128, 128256), {"dp_shard": 64, "tp": 8}),
    "1T MoE": (
        "Qwen3Moe",
        qwen3(7168, 18432, 61, 64, 163840) | {"num_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        {"dp_replicate": 8, "dp_shard": 512},
    ),
}
"""Family, configuration, plan. The MoE shape is planned on data axes: nothing executes ep, and no layout declares it on tp."""


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str) -> dict[str, Any]:
    """Seconds and peak memory of each part, in a process that has done nothing else."""
    family, config, sizes = MODELS[name]
    started = time.perf_counter()
    import torch
    import transformers

    import mixle_core as mx

    make, shape = getattr(transformers, f"{family}ForCausalLM"), getattr(transformers, f"{family}Config")
    mx.load_plugins()
    from mixle_core.runtime import explain

    imported, imported_mib = time.perf_counter(), peak_mib()
    with torch.device("meta"):
        model = make(shape(**config))
    built, built_mib = time.perf_counter(), peak_mib()
    plan = mx.ParallelPlan(**sizes)
    table = explain(model, plan)
    done = time.perf_counter()
    return {
        "ranks": plan.world_size,
        "plan": plan.describe(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows": len(table.rows),
        "import_s": imported - started,
        "model_s": built - imported,
        "plan_s": done - built,
        "imported_mib": imported_mib,
        "model_mib": built_mib - imported_mib,
        "plan_mib": peak_mib() - built_mib,
        "peak_mib": peak_mib(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))

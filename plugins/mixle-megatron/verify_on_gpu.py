# ruff: noqa: INP001, T201 - a script of its own, which prints what it finds
"""Compare Megatron plans with one process on GPUs, and try the functions for Megatron Bridge: what no CPU can show.

    torchrun --nproc-per-node 4 verify_on_gpu.py            # one GPU a process, NCCL
    torchrun --nproc-per-node 4 verify_on_gpu.py --bridge   # and Bridge's providers and loop, where installed

Exit 0 when every plan agrees to the tolerance, 1 when one does not. It has not been run.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import mixle_core as mx
from mixle_core.audit import verify

PLANS = {
    2: [
        ("tiny", mx.ParallelPlan(tp=2, sequence_parallel=True)),
        ("tiny-tied", mx.ParallelPlan(pp=2, microbatches=4)),
        ("tiny-moe", mx.ParallelPlan(dp_shard=2, ep=2)),
    ],
    4: [
        ("tiny-tied", mx.ParallelPlan(pp=2, tp=2, microbatches=4)),
        ("tiny-moe", mx.ParallelPlan(dp_shard=2, tp=2, ep=2, etp=1, sequence_parallel=True)),
        ("tiny-moe", mx.ParallelPlan(dp_shard=2, tp=2, ep=2, etp=2, sequence_parallel=True)),
    ],
}


def loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed loss of the next tokens."""
    ids = ids.to(next(module.parameters()).device)
    logits = module(ids)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def batch(update: int, backward: int, data_rank: int) -> torch.Tensor:
    """Random ids."""
    generator = torch.Generator().manual_seed(1 + 7919 * update + 104729 * backward + 15485863 * data_rank)
    return torch.randint(0, 260, (2, 32), generator=generator)


def compared(tolerance: float) -> bool:
    """Every plan for this number of processes against one process on the same GPU."""
    world = int(os.environ["WORLD_SIZE"])
    plugins = mx.load_plugins(required=["megatron", "megatron-gpt"])
    good = True
    for size, plan in PLANS[world]:
        report = verify(
            lambda size=size: plugins.ask_one("megatron-gpt", "build_model", spec=size),
            plan,
            loss=loss,
            batch=batch,
            backend="megatron",
            plugins=plugins,
        )
        passed = report.passed(tolerance)
        good = good and passed
        if int(os.environ["RANK"]) == 0:
            print(f"{size} {plan.describe()}: {'verified' if passed else 'WRONG'}, largest error {report.error:.1e}", flush=True)
    return good


def bridge() -> None:
    """Set a plan on a provider of Megatron Bridge; raises what does not fit."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    world = int(os.environ["WORLD_SIZE"])
    plan = mx.ParallelPlan(dp_shard=world // 2, tp=2, sequence_parallel=True)
    provider = GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=256)
    backend = mx.get_training_backend("megatron")
    backend.configure_provider(provider, plan)
    print("provider:", provider.tensor_model_parallel_size, provider.sequence_parallel, provider.calculate_per_token_loss, flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bridge", action="store_true")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="fp32 on a GPU rounds otherwise than the reference's kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("verify_on_gpu.py needs one GPU for each process; on a CPU run the plugin's tests")
    torch.backends.cuda.matmul.allow_tf32 = False
    good = compared(options.tolerance)
    if options.bridge:
        bridge()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

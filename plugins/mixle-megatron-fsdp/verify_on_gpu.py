# ruff: noqa: INP001, T201 - a script of its own, which prints what it finds
"""Measure on GPUs what was measured on CPU, and say where they differ: exit 0 when nothing does, 1 otherwise, 2 without GPUs.

    torchrun --nproc-per-node 2 verify_on_gpu.py     # data parallelism, accumulation, dtypes, megatron-fsdp's own mean
    torchrun --nproc-per-node 4 verify_on_gpu.py     # and hybrid sharding and tensor parallelism
    torchrun --nproc-per-node 2 verify_on_gpu.py --rehearse     # the script itself, on CPU with gloo

One GPU a process. Only when both end with 0 is there a proof that a claim could rest on.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from mixle_megatron_fsdp import measure
from mixle_megatron_fsdp._upstream import redirect_cuda

EXACT = 1e-5
Check = tuple[str, Callable[[], measure.Found], bool]
"""What is run, how, and whether it was exact on CPU."""


def checks(kind: str, ranks: int) -> list[Check]:
    """Of a world of `ranks`, in order."""

    def data(**options: object) -> Callable[[], measure.Found]:
        return lambda: measure.data_parallel(kind, **options)  # type: ignore[arg-type]

    def half(**options: torch.dtype) -> Callable[[], measure.Found]:
        return lambda: measure.half_precision(kind, backwards=4, **options)

    found: list[Check] = [
        ("sum, one backward", data(), True),
        ("sum, eight backwards", data(backwards=8), True),
        ("sum, three backwards, tied", data(backwards=3, tied=True), True),
        ("sum, three backwards, default synchronisation", data(backwards=3, auto_sync=True), True),
        ("optim, no_sync", data(backwards=3, strategy="optim"), True),
        ("optim, no_sync under the default synchronisation", data(backwards=3, strategy="optim", auto_sync=True), False),
        ("bf16, default", half(), False),
        ("bf16, buffer in fp32", half(main_grads=torch.float32), True),
        ("bf16, buffer in fp32, calls in bf16", half(main_grads=torch.float32, comm=torch.bfloat16), False),
    ]
    if kind == "cuda":  # PREMUL_SUM does not exist on gloo
        found.append(("megatron-fsdp's own mean, three backwards", data(backwards=3, average=True), True))
    if ranks == 4:
        found += [
            ("hybrid, one backward", data(replicas=2), True),
            ("hybrid, three backwards", data(replicas=2, backwards=3), True),
            ("hybrid, no_sync under the default synchronisation", data(replicas=2, backwards=3, auto_sync=True), False),
            ("partial on tp", lambda: measure.tensor_parallel(kind), False),
        ]
    return found


def main() -> int:
    """Run every check on every rank and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on CPU, with the names of torch.cuda redirected; proves nothing of GPUs")
    kind = "cpu" if parser.parse_args().rehearse else "cuda"
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks not in (2, 4):
        print(f"{ranks} processes: start 2 or 4 with torchrun", file=sys.stderr)
        return 2
    if kind == "cuda" and torch.cuda.device_count() <= local:
        print(f"process {local} finds {torch.cuda.device_count()} GPUs; each process needs its own", file=sys.stderr)
        return 2
    if kind == "cuda":
        torch.cuda.set_device(local)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    else:
        torch.set_num_threads(1)
        redirect_cuda()
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=120))
    differs = 0
    for name, run, exact in checks(kind, ranks):
        result = run()
        # a norm or parameters that were not measured are NaN, which is not above anything
        seen = result.worst < EXACT and not (result.norm > EXACT or result.parameters > EXACT)
        worst = torch.tensor([float(seen)])
        dist.all_reduce(worst, op=dist.ReduceOp.MIN)
        differs += bool(worst.item()) != exact
        if dist.get_rank() == 0:
            verdict = "as on CPU" if bool(worst.item()) == exact else "DIFFERS FROM CPU"
            numbers = f"gradients {result.worst:.1e}  norm {result.norm:.1e}  parameters {result.parameters:.1e}"
            print(f"{name:52} {numbers}  calls {result.reductions:2}  {', '.join(sorted(result.dtypes)):14}  {verdict}", flush=True)
    if dist.get_rank() == 0:
        print("everything as on CPU" if not differs else f"{differs} differ from what was measured on CPU", flush=True)
    dist.barrier()
    return 1 if differs else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the backends may outlive an orderly exit and abort it

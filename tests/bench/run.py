"""Measure mixle against loops by hand and other libraries, and write docs/benchmarks.md: python tests/bench/run.py [--quick]."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import pages

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # every contender runs on gloo and CPU tensors
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "5",
    "PYTHONWARNINGS": "ignore",
}


@attrs.frozen
class Layout:
    """Ranks, and who is compared with mixle on them."""

    title: str
    sizes: dict[str, int]
    others: tuple[str, ...]


LAYOUTS = (
    Layout("DDP 2", {"dp_replicate": 2}, ("HandDDP",)),
    Layout("FSDP2 2", {"dp_shard": 2}, ("HandFSDP",)),
    Layout("TP 2", {"tp": 2}, ("HandTP",)),
    Layout("DDP 2 x TP 2", {"dp_replicate": 2, "tp": 2}, ("HandDDP", "TorchReplicate", "Transformers", "Fabric", "Accelerate")),
    Layout("FSDP2 2 x TP 2", {"dp_shard": 2, "tp": 2}, ("HandFSDP", "TorchFSDP", "Transformers", "Fabric", "Accelerate")),
)


def measure_layout(layout: Layout, folder: str, quick: bool) -> dict[str, Any]:
    """Each contender alone, then those that are right together."""
    from alone import alone
    from report import is_right
    from together import together

    import mixle_core as mx
    from mixle_core.testing import run_ranks

    plan = mx.ParallelPlan(**layout.sizes)
    size = "tiny" if quick else "bench" if plan.world_size == 2 else "bench of 4"
    found: dict[str, Any] = {}
    for name in ("Mixle", *layout.others):
        outcomes = run_ranks(alone, plan.world_size, name, size, plan, folder, quick, timeout_s=300, group_timeout_s=120)
        found[name] = outcomes[0].value
        for key in ("set_up_mib", "steps_mib", "tensors_mib"):
            if key in found[name]:
                found[name][key] = max(outcome.value[key] for outcome in outcomes)
        say(f"{layout.title}: {name} alone")
    names = [name for name in ("Mixle", *layout.others) if is_right(found[name])]
    rounds, steps, warm = (3, 1, 1) if quick else (31, 2, 4) if plan.world_size == 2 else (17, 2, 4)
    outcomes = run_ranks(together, plan.world_size, names, size, plan, folder, rounds, steps, warm, timeout_s=900, group_timeout_s=120)
    say(f"{layout.title}: together")
    return {"title": layout.title, "alone": found, "seconds": outcomes[0].value}


def measure_checkpoints(quick: bool) -> list[dict[str, Any]]:
    from checkpoints import measured

    from mixle_core.testing import run_ranks

    mib, rounds = (2.0, 2) if quick else (200.0, 11)
    found = []
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_ranks(measured, ranks, folder, mib, rounds, timeout_s=600, group_timeout_s=120)
        memory = {key: max(outcome.value["memory"][key] for outcome in outcomes) for key in ("save", "load")}
        found.append({**outcomes[0].value, "memory": memory, "ranks": ranks})
        say(f"checkpoints on {ranks} ranks")
    return found


def measure_counting() -> float:
    from cost import per_collective

    from mixle_core.testing import run_ranks

    return float(run_ranks(per_collective, 1)[0].value)


def measure_planning(quick: bool) -> dict[str, Any]:
    """Each in an interpreter of its own; quick ones in a fork, where everything is imported already."""
    from planning import MODELS, measure

    from mixle_core.testing import run_ranks

    found = {}
    for name in MODELS:
        if quick:
            found[name] = run_ranks(measure, 1, name)[0].value
            continue
        done = subprocess.run([sys.executable, str(HERE / "planning.py"), name], capture_output=True, text=True, timeout=300, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        say(f"planning: {name}")
    return found


_started = time.monotonic()


def say(what: str) -> None:
    print(f"[{time.monotonic() - _started:5.0f} s] {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three pairs of a tiny model: a smoke test whose numbers mean nothing")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "docs" / "benchmarks.md")
    parser.add_argument("--only-checkpoints", action="store_true", help="measure them alone, and write them into the page that is there")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if options.only_checkpoints:
        pages.put_checkpoints(options.output, measure_checkpoints(options.quick))
        return
    where = pages.head(quick=options.quick)  # the load before this program adds to it
    with tempfile.TemporaryDirectory() as folder:
        layouts = [measure_layout(layout, folder, options.quick) for layout in LAYOUTS]
    page = pages.page(where, layouts, measure_counting(), measure_planning(options.quick), measure_checkpoints(options.quick))
    options.output.write_text(page)
    print(page)


if __name__ == "__main__":
    main()

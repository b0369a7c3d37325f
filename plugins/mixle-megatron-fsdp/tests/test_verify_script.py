"""The script for GPU machines: what it says without one, and that it runs to its end on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "verify_on_gpu.py"
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_gpus_it_ends_with_2_and_says_so():
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 2
    assert "process 0 finds 0 GPUs; each process needs its own" in done.stderr


def test_its_rehearsal_finds_what_was_measured():
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*LAUNCH, SCRIPT, "--rehearse"], capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as on CPU") == 10 and "everything as on CPU" in done.stdout
    assert "DIFFERS" not in done.stdout

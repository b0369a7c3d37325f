"""`mixle ...` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def mixle_command(*words: str, cwd: Path, timeout: float = 240, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command line; modules beside the test in `cwd` are found."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(cwd), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    environment |= {"COLUMNS": "200", **(env or {})}
    command = [os.environ.get("MIXLE_TEST_PYTHON", sys.executable), "-m", "mixle_core.cli.rank", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd, check=False)

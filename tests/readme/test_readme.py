"""Every block of the README runs as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"<!-- ranks: (\d+) -->\n```python\n(.*?)```", README, re.DOTALL)
CONSOLE = re.findall(r"```console\n(.*?)```", README, re.DOTALL)


def test_every_block_is_of_a_kind_that_is_run():
    assert len(re.findall(r"^```\w+$", README, re.MULTILINE)) == len(PYTHON) + len(CONSOLE)
    assert len(PYTHON) == 4


EXPECTED = ("nats per byte", "('dp_shard', 'tp')", "update 2: loss", "held out: 5.")


@pytest.mark.parametrize(
    ("ranks", "code", "expected"),
    [(*block, said) for block, said in zip(PYTHON, EXPECTED, strict=True)],
    ids=["language-model", "explain", "own-loop", "session"],
)
def test_python_block(ranks, code, expected, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    if int(ranks) > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--rdzv-backend", "c10d"]
        command = [*launcher, "--rdzv-endpoint", "localhost:0", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert expected in done.stdout


def test_the_console_commands_are_what_continuous_integration_runs():
    """tox cannot run itself: .ci/run runs both commands, and tox.ini has the environment they name."""
    assert CONSOLE == ["python -m pip install tox && tox -e demo\ntox\n"]
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"tox\" run$", script, re.MULTILINE)
    assert re.search(r"tox\" run -e demo$", script, re.MULTILINE)
    assert "[testenv:demo]" in (ROOT / "tox.ini").read_text()


def test_every_linked_file_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).is_file(), target

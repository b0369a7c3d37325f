"""The suite runs and its page has all rows. Nothing is said about the numbers, except that what is compared is right."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

BY_HAND = {"DDP 2": ["by hand: DDP"], "FSDP2 2": ["by hand: fully_shard"], "TP 2": ["by hand: local TP"]}
LIBRARIES = ["transformers: DistributedConfig", "Lightning Fabric: ModelParallelStrategy", "accelerate: ParallelismConfig"]
CROSSED = {
    "DDP 2 x TP 2": ["by hand: DDP + local TP", "torch: parallelize_module + replicate (FSDP2's)", *LIBRARIES],
    "FSDP2 2 x TP 2": ["by hand: fully_shard + local TP", "torch: parallelize_module + fully_shard", *LIBRARIES],
}


AHEAD = ("alone", "together", "transformers.models.qwen3.modeling_qwen3", "lightning_fabric.strategies", "accelerate")
RUN = f"import runpy; from mixle_core.testing import preload; preload(*{AHEAD}); runpy.run_module('run', run_name='__main__')"
"""The suite with its imports done once, before the ranks start: in a measurement they would count as memory of every contender."""


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """Title -> rows of its table, each a list of cells."""
    output = tmp_path_factory.mktemp("bench") / "page.md"
    command = [sys.executable, "-c", RUN, "--quick", "--output", str(output)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    page = output.read_text()
    assert page in done.stdout
    found = {}
    for section in page.split("\n## ")[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        found[section.splitlines()[0].split(" (")[0]] = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return found


def expected(layouts):
    return [f"{layout}: {name}" for layout, others in layouts.items() for name in ("mixle", *others)]


def test_every_contender_of_one_axis_is_timed(sections):
    rows = sections["A step against loops by hand"]
    assert [row[0] for row in rows] == expected(BY_HAND)
    assert all(re.fullmatch(r"[\d.]+", row[1]) for row in rows)


def test_every_contender_of_two_axes_is_timed_or_says_why_not(sections):
    rows = sections["Data and tensor parallelism together"]
    assert [row[0] for row in rows] == expected(CROSSED)
    assert all(re.fullmatch(r"[\d.]+|does not run|not compared", row[1]) for row in rows)
    assert [row[0] for row in rows if "mixle" in row[0] and not re.fullmatch(r"[\d.]+e-0[6-9]", row[5])] == []


def test_traffic_and_memory_have_a_row_for_whatever_runs(sections):
    times = [*sections["A step against loops by hand"], *sections["Data and tensor parallelism together"]]
    running = [row[0] for row in times if row[1] != "does not run"]
    (traffic,) = (rows for title, rows in sections.items() if title.startswith("Collectives"))
    assert [row[0] for row in traffic] == running
    assert not any("more" in row[-1] for row in traffic)
    assert [row[0] for row in sections["Peak memory per rank"]] == running


def test_checks_and_planning_have_all_rows(sections):
    (checks,) = (rows for title, rows in sections.items() if title.startswith("What mixle's checks"))
    assert [row[0] for row in checks] == [*BY_HAND, *CROSSED]
    assert [row[0].split(":")[0] for row in sections["Plan and table of large models"]] == ["8B", "70B", "405B", "1T MoE"]


def test_the_page_says_what_fell_short(sections):
    assert "What fell short, and why" in sections


def test_every_measure_of_checkpoints_is_compared_with_its_goal(sections):
    rows = sections["Checkpoints"]
    wanted = [f"{ranks} ranks: {what}" for ranks in (2, 4) for what in ("save", "load, warm", "load, cold", "async save, until it returns")]
    assert [row[0] for row in rows] == wanted
    assert all(re.fullmatch(r"[\d.]+", row[3]) and re.match("met|missed", row[5]) for row in rows)

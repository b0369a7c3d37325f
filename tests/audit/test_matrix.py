"""`mixle verify --matrix`: every cell of a plan, what is passed over says why, and a planted fault has its name and cause."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from commands import mixle_command

import mixle_core as mx
from mixle_core.audit import cells, verify_matrix
from mixle_core.audit.matrix import tie
from mixle_core.testing import ToyLayout, next_token_loss, run_ranks, token_batch, toy_model

HERE = Path(__file__).parent
SHORT = ["1 backward", "1 backward, clipped", "4 backwards", "4 backwards, clipped", "short windows", "short windows, clipped"]
FULL = ["bf16", "activation checkpointing", "use that may vary", "frozen parameters", "tied embedding"]
PLAN = mx.ParallelPlan(dp_replicate=2)


def test_the_cells_and_what_they_change():
    chosen = {cell.name: cell for cell in cells(mx.ParallelPlan(dp_shard=2, microbatches=8), full=True)}
    assert list(chosen) == [*SHORT, *FULL]
    assert [chosen[name].windows for name in SHORT[::2]] == [(1, 1, 1), (4, 4, 4), (4, 3, 1)]
    assert all(max(cell.windows) == cell.plan.num_backwards and cell.plan.dp_shard == 2 for cell in chosen.values())
    assert [cell.name for cell in chosen.values() if cell.clip] == SHORT[1::2]
    assert (chosen["bf16"].plan.precision, chosen["activation checkpointing"].plan.activation_checkpointing) == ("bf16", True)
    assert [cell.name for cell in cells(PLAN, full=False)] == SHORT


def found(full: bool, plugins: dict[str, object]):
    torch.set_num_threads(1)
    reports = verify_matrix(toy_model, list(cells(PLAN, full=full)), loss=next_token_loss, batch=token_batch, plugins=plugins)
    return [(report.name, report.passed, report.not_run, report.report and [u.cause for u in report.report.updates]) for report in reports]


def test_every_cell_of_a_right_plan_passes_and_what_is_not_run_says_why():
    for outcome in run_ranks(found, 2, True, {"toy": ToyLayout()}, timeout_s=240):
        assert [name for name, *_ in outcome.value] == [*SHORT, *FULL]
        assert all(passed for _, passed, *_ in outcome.value), outcome.value
        reasons = {name: why for name, _, why, _ in outcome.value if why}
        assert reasons == {"tied embedding": "the model has no config.tie_word_embeddings and tie_weights()"}


def test_a_model_that_is_tied_already_is_passed_over():
    class Config:
        tie_word_embeddings = True

    model = torch.nn.Linear(2, 2)
    model.config, model.tie_weights = Config(), lambda: None
    with pytest.raises(mx.LayoutError, match="ties them already"):
        tie(model)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return mixle_command("verify", *words, cwd=HERE.parent / "cli")


def test_the_command_shows_each_cell_once():
    done = command("--model", "qwen3:tiny", "--tp", "2", "--matrix", "full", "--rows", "2", "--length", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line[:32].strip() for line in lines[:-1]] == [*SHORT, *FULL]
    assert all(" right " in line for line in lines[:-1])
    assert lines[-1] == "verified: 11 of 11 cells of tp=2 against one process"


def test_what_is_wrong_has_its_cause_and_exits_1():
    """A model that computes something else each time it is built: by a constant factor."""
    done = command("--model", "wrong_models:moody", "--dp-replicate", "2", "--matrix", "windows")
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line for line in done.stdout.splitlines() if " WRONG " in line]
    assert len(wrong) == len(SHORT)
    assert all("; the worst gradient is scaled by a constant: 0." in line for line in wrong)
    assert done.stdout.splitlines()[-1] == "WRONG: 6 of 6 cells of dp_replicate=2 against one process"
    assert "exit code" not in done.stderr

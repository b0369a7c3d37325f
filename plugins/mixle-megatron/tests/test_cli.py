"""`mixle explain`, `verify` and `train` with Megatron-Core, on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODEL = ["--model", "megatron-gpt:tiny", "--backend", "megatron"]
SIZES = ["--sequence-length", "32", "--lr", "1e-2", "--warmup", "2", "--batch-size", "4", "--eval-rows", "8"]


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", "mixle_core.cli.rank", *arguments, "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What the command printed, once it has ended as asked."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def receipts_and_result(process: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], float]:
    shown = lines(process)
    (result,) = [line["held_out_nats_per_token"] for line in shown if "held_out_nats_per_token" in line]
    return [line for line in shown if "update" in line], result


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    (path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 400)
    return path


@pytest.fixture(scope="module")
def two_commands(folder) -> dict[str, subprocess.Popen[str]]:
    """Of two ranks each, side by side: most of their time goes into imports."""
    pipeline = ["--pp", "2", "--microbatches", "2", "--steps", "8", "--save-receipts", str(folder / "receipts.jsonl")]
    return {
        "verify": started("verify", *MODEL, "--tp", "2", "--rows", "2", "--length", "16"),
        "train": started("train", *MODEL, *pipeline, *SIZES, "--data", str(folder / "text.txt")),
    }


@pytest.fixture
def here(monkeypatch, capsys):
    """Run `mixle ARGUMENTS` in this process; return (exit code, stdout, stderr)."""
    from mixle_core.cli import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mixle", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return run


def test_explain_says_who_executes_and_who_reduces(here):
    code, out, err = here("explain", *MODEL, "--tp", "2", "--pp", "2", "--json")
    assert code == 0, err
    shown = json.loads(out[out.index("{") :])
    text = json.dumps(shown)
    assert '"executors": {"pp": "megatron", "tp": "megatron"}' in text
    rows = {row["name"]: row for row in shown["rows"]} if "rows" in shown else {row["name"]: row for row in shown["table"]["rows"]}
    norm = rows["decoder.layers.0.self_attention.q_layernorm.weight"]
    assert (norm["owner"], norm["operation"], norm["pending"]) == ("megatron", "sum", ["tp"])
    assert rows["decoder.layers.0.input_layernorm.weight"]["operation"] == "none"


def test_explain_of_a_plan_that_is_not_served_is_bad_input(here):
    code, _, err = here("explain", *MODEL, "--tp", "3")
    assert code == 2
    assert "num_attention_heads (4) must be a multiple of" in err
    assert "Traceback" not in err


def test_verify_passes(two_commands):
    (report,) = lines(two_commands["verify"])
    assert report["passed"] is True
    assert report["error"] < 1e-5
    assert len(report["updates"]) == 3 and all(update["copies_equal"] for update in report["updates"])


def test_a_pipeline_learns_and_leaves_receipts(two_commands, folder):
    shown, held_out = receipts_and_result(two_commands["train"])
    written = [json.loads(line) for line in (folder / "receipts.jsonl").read_text().splitlines()]
    assert [receipt["update"] for receipt in written] == [receipt["update"] for receipt in shown] == list(range(8))
    assert written[7]["loss"] < written[0]["loss"] - 1.0
    assert held_out < written[0]["loss"] - 1.0
    assert [owner["owner"] for receipt in written for owner in receipt["owners"]] == ["megatron"] * 8


def test_experts_learn_with_every_axis_but_the_pipeline(folder):
    plan = ["--dp-shard", "2", "--tp", "2", "--ep", "2", "--etp", "1", "--sequence-parallel"]
    model = ["--model", "megatron-gpt:tiny-moe", "--backend", "megatron"]
    receipts, held_out = receipts_and_result(started("train", *model, *plan, *SIZES, "--data", str(folder / "text.txt"), "--steps", "6"))
    assert [receipt["num_tokens"] for receipt in receipts] == [2 * 4 * 32] * 6
    assert receipts[5]["loss"] < receipts[0]["loss"] - 0.5
    assert held_out < receipts[0]["loss"] - 0.5

"""The command line on several ranks: exit codes, the one line of a failing rank, training a directory."""

import json
import os
from pathlib import Path

import pytest
from commands import mixle_command

HERE = Path(__file__).parent


def mixle(*arguments, cwd=None, timeout=240):
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return mixle_command(*arguments, cwd=cwd or HERE, timeout=timeout, env={"PYTHONPATH": paths})


def test_verify_prints_the_errors_by_name_and_passes():
    done = mixle("verify", "--model", "qwen3:tiny", "--dp-shard", "2", "--tp", "2", "--accumulation", "2", "--strict", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert report["error"] <= 1e-5
    assert [update["num_tokens"] for update in report["updates"]] == [496, 248, 496]


def test_verify_of_a_callable_without_an_embedding():
    done = mixle("verify", "--model", "wrong_models:plain", "--dp-replicate", "2")
    assert done.returncode == 0, done.stderr
    assert "verified: largest error" in done.stdout


def test_verify_exits_1_and_names_the_worst_parameter_when_something_is_wrong():
    done = mixle("verify", "--model", "wrong_models:moody", "--dp-replicate", "2", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is False
    assert report["updates"][0]["worst_gradient"] in {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert report["updates"][0]["gradient_error"] > 1e-2


def test_verify_of_a_model_that_starts_anew_at_every_call_is_bad_input():
    done = mixle("verify", "--model", "wrong_models:unrepeatable", "--dp-replicate", "2")
    assert done.returncode == 2
    assert "two models of one build() start with different values (4 parameters, such as 0.bias)" in done.stderr


def test_an_error_on_the_ranks_is_one_line_with_its_exit_code():
    done = mixle("train", "--model", "qwen3:tiny", "--tp", "2", "--sequence-parallel", "--sequence-length", "33", "--steps", "1")
    assert done.returncode == 2
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("mixle: ")
    assert "whose length 33 is not divisible by tp=2" in line
    assert "Traceback" not in done.stderr


def test_an_undeclared_model_under_tp_gets_the_lines_to_paste():
    done = mixle("verify", "--model", "wrong_models:Undeclared", "--tp", "2")
    assert done.returncode == 2
    assert "4 of 4 parameters are undeclared on axis 'tp' of size 2" in done.stderr
    assert '"layers.*": ModuleLayout(parameters={"bias": Replica("complete"), "weight": Replica("complete")})' in done.stderr


@pytest.mark.parametrize("plan", [["--dp-replicate", "2"], ["--dp-shard", "2"]])
def test_a_local_transformers_directory_is_trained_from_its_values(tmp_path, plan):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy\n" * 400)
    arguments = ["--model", f"qwen3:{tmp_path / 'model'}", "--data", str(tmp_path / "text.txt"), "--sequence-length", "32"]
    done = mixle("train", *arguments, *plan, "--steps", "12", "--json", "--lr", "1e-2", "--warmup", "2", "--verify", "--strict")
    assert done.returncode == 0, done.stderr
    verified, *receipts, result = [json.loads(line) for line in done.stdout.splitlines()]
    assert verified["passed"] is True
    assert receipts[-1]["loss"] < receipts[0]["loss"] - 0.5
    assert result["held_out_nats_per_token"] < receipts[0]["loss"]

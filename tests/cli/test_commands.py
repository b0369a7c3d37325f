"""The command line in this process: what it prints and how it exits."""

import json

import pytest

GIB = 2**30


def one_line(err):
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    return lines[0]


def test_plugins_lists_name_distribution_version_and_state(mixle):
    code, out, _ = mixle("plugins", "--json")
    assert code == 0
    listed = {row["name"]: row for row in json.loads(out)}
    assert list(listed) == ["dtensor-tp", "qwen3", "torch-ddp", "torch-fsdp2"]
    assert listed["torch-ddp"] == {"name": "torch-ddp", "distribution": "mixle-torch-ddp", "version": "0.1.0", "state": "enabled"}


def test_plugins_shows_what_the_allow_list_leaves_out(mixle, monkeypatch):
    monkeypatch.setenv("MIXLE_PLUGINS", "qwen3")
    _, out, _ = mixle("plugins")
    assert "left out by MIXLE_PLUGINS" in out
    code, out, _ = mixle("plugins", "--json", "--check")
    assert code == 0
    assert {row["name"]: row["state"] for row in json.loads(out)} == {
        "dtensor-tp": "left out by MIXLE_PLUGINS",
        "qwen3": "enabled, imports",
        "torch-ddp": "left out by MIXLE_PLUGINS",
        "torch-fsdp2": "left out by MIXLE_PLUGINS",
    }


def test_explain_says_who_owns_what_and_what_it_costs(mixle):
    code, out, _ = mixle("explain", "--model", "qwen3:tiny", "--dp-shard", "2", "--tp", "2")
    assert code == 0
    assert "Ownership of 25 trainable parameters, plan dp_shard=2 x tp=2" in out
    row = next(line for line in out.splitlines() if "model.layers.*.self_attn.q_norm.weight" in line)
    for cell in ("torch-fsdp2", "tp: Replica(partial)", "dp_shard tp", "sum over dp_shard then tp", "float32", "4", "192 B"):
        assert cell in row, cell
    assert "tp is executed by dtensor-tp" in out
    assert "torch-ddp declined: dp_shard=2 shards parameters\n" in out
    assert "without activations" in out


def test_explain_as_json_has_the_table_and_exact_memory(mixle):
    code, out, _ = mixle("explain", "--model", "qwen3:tiny", "--dp-shard", "2", "--tp", "2", "--json")
    assert code == 0
    found = json.loads(out)
    rows = {row["name"]: row for row in found["rows"]}
    gate = rows["model.layers.0.mlp.gate_proj.weight"]
    assert (gate["shape"], gate["local_shape"], gate["stored"], gate["copies"]) == ([128, 64], [64, 64], ["dp_shard"], 1)
    assert gate["payload_bytes"] == 64 * 64 * 4
    norm = rows["model.norm.weight"]
    assert (norm["pending"], norm["reduced"], norm["copies"]) == (["dp_shard", "tp"], ["dp_shard"], 2)
    # 64 x 64 attention, 2 x 32 x 64 key/value, 3 x 64 x 64 mlp per layer and rank, halved by dp_shard; norms are halved only
    sharded = 2 * (2 * 64 * 32 + 2 * 16 * 64 + 3 * 64 * 64) + 2 * 128 * 64
    replicated = 2 * (2 * 64 + 2 * 16) + 64
    elements = (sharded + replicated) // 2
    memory = found["memory_bytes_per_rank"]
    assert memory == {"parameters": 4 * elements, "gradients": 4 * elements, "optimizer": 8 * elements, "total": 16 * elements} | {
        "activations_included": False
    }


def test_explain_is_repeatable_and_by_parameter_has_a_line_for_each(mixle):
    arguments = ("explain", "--model", "qwen3:tiny", "--dp-replicate", "2", "--tp", "2")
    digests = {json.loads(mixle(*arguments, "--json")[1])["digest"] for _ in range(2)}
    assert len(digests) == 1
    _, out, _ = mixle(*arguments, "--by-parameter")
    assert sum("self_attn.q_norm.weight" in line for line in out.splitlines()) == 2


def test_405b_on_512_ranks_is_planned_in_under_a_second(mixle):
    runs = [mixle("explain", "--model", "qwen3:405b", "--dp-shard", "64", "--tp", "8", "--json") for _ in range(2)]
    found = [json.loads(out) for _, out, _ in runs]
    assert min(run["planning_s"] for run in found) < 1.0
    assert len(found[0]["rows"]) == 126 * 11 + 3
    assert 2.9 * GIB < found[0]["memory_bytes_per_rank"]["parameters"] < 3.1 * GIB


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pp", "2"], ["exactly one executor (plan: pp=2)", "none for 1 of 1: pp", "set the axis to 1"]),
        (["--cp", "2"], ["(plan: cp=2)", "cp"]),
        (["--ep", "2", "--dp-shard", "2"], ["(plan: dp_shard=2 x ep=2)", "ep"]),
        (["--tp", "4"], ["num_key_value_heads=2 is not divisible by tp=4", "choose tp"]),
        (["--tp", "0"], ["tp=0: expected an integer of at least 1"]),
        (["--sequence-parallel"], ["sequence_parallel=True with tp=1"]),
        (["--dp-shard", "2", "--backend", "megatorn"], ["backend megatorn", "no plugin of it owns dp_shard=2"]),
    ],
)
def test_a_refused_plan_is_one_line_and_exit_code_2(mixle, arguments, said):
    code, _, err = mixle("explain", "--model", "qwen3:tiny", *arguments)
    assert code == 2
    for words in said:
        assert words in err, err
    if "--backend" not in arguments:
        one_line(err)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("qwen3", "expected NAME:SIZE of a plugin"),
        ("qwen3:huge", "is neither a size (tiny,"),
        ("qwen4:tiny", "'qwen4' is neither a plugin (installed: dtensor-tp, qwen3, torch-ddp, torch-fsdp2) nor an importable module"),
        ("torch-ddp:tiny", "plugin 'torch-ddp' builds no models"),
        ("json:nothing", "module 'json' has no 'nothing'"),
        ("json:dumps", "raised TypeError"),
        ("builtins:list", "gave list; expected a torch.nn.Module"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line_and_exit_code_2(mixle, spec, said):
    code, _, err = mixle("explain", "--model", spec)
    assert code == 2
    assert said in one_line(err)


def test_unknown_options_are_click_usage_errors(mixle):
    code, _, err = mixle("explain", "--model", "qwen3:tiny", "--dp", "2")
    assert code == 2
    assert "No such option" in err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("missing-file.txt", "no text file there"),
        ("short.txt", "1 ids are held out; expected at least 129 for a row"),
        ("large.npy", "token id 999 is outside the model's vocabulary of 256"),
        ("square.npy", "expected integers of one dimension"),
        ("pickled.npy", "not a readable .npy file of integers (it is no array of numbers); text is tokenized first"),
    ],
)
def test_data_that_cannot_be_used_is_one_line_and_exit_code_2(mixle, tmp_path, monkeypatch, data, said):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    np.save(tmp_path / "large.npy", np.full(10_000, 999))
    np.save(tmp_path / "square.npy", np.zeros((4, 4), dtype=np.int64))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    code, _, err = mixle("train", "--model", "qwen3:tiny", "--data", data, "--steps", "1")
    assert code == 2
    assert said in one_line(err)


def test_train_in_one_process_writes_receipts_as_json_lines(mixle, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    arguments = ["--model", "qwen3:tiny", "--data", str(text), "--steps", "4", "--sequence-length", "32", "--json", "--batch-size", "4"]
    code, out, _ = mixle("train", *arguments, "--microbatches", "2", "--accumulation", "2")
    assert code == 0
    *receipts, result = [json.loads(line) for line in out.splitlines()]
    assert [receipt["update"] for receipt in receipts] == [0, 1, 2, 3]
    assert {receipt["num_tokens"] for receipt in receipts} == {2 * 4 * 32}
    assert {(r["num_examples"], r["num_update_local_examples"], r["microbatches"], r["accumulation"]) for r in receipts} == {(8, 8, 2, 2)}
    assert receipts[-1]["loss"] < receipts[0]["loss"]
    assert result["updates"] == 4
    code, _, err = mixle("train", *arguments, "--require-below", "0.01")
    assert code == 1
    assert "the held-out loss is not below 0.01" in err


def test_verify_takes_a_tolerance_of_zero_and_refuses_rows_without_a_loss_token(mixle):
    code, out, _ = mixle("verify", "--model", "qwen3:tiny", "--tolerance", "0", "--json")
    assert (code, json.loads(out)["passed"], json.loads(out)["tolerance"]) == (1, False, 0.0)
    code, _, err = mixle("verify", "--model", "qwen3:tiny", "--length", "1")
    assert code == 2
    assert "1 is not in the range x>=2" in err


@pytest.mark.parametrize("option", [("--save-every", "2"), ("--keep", "3"), ("--resume", "auto")])
def test_options_of_checkpoints_need_the_directory_of_the_run(mixle, option):
    code, _, err = mixle("train", "--model", "qwen3:tiny", *option)
    assert code == 2
    assert one_line(err) == f"mixle: {' '.join(option)} without --save; give the directory of the run"

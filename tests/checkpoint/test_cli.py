"""`mixle checkpoint`: what lies on disk, and exit 1 with the file named when it is wrong."""

import json
import subprocess
import sys

import pytest
import torch

from mixle_core.checkpoint import Piece, begin, commit, data_file, write_data
from mixle_core.cli import checkpoints


def damage(step, name="data-00001-000.safetensors"):
    data = bytearray((step / name).read_bytes())
    data[-1] ^= 1
    (step / name).write_bytes(data)


def test_list_shows_steps_sizes_and_what_is_not_whole(mixle, tmp_path, save):
    code, out, _ = mixle("checkpoint", "list", tmp_path)
    assert (code, out) == (0, f"no step is committed under {tmp_path}\n")
    save(tmp_path, 1)
    code, out, _ = mixle("checkpoint", "list", tmp_path)
    assert code == 0
    assert "step-00000001" in out and "whole" in out and "KiB" in out
    (save(tmp_path, 2) / "data-00001-000.safetensors").unlink()
    code, out, _ = mixle("checkpoint", "list", tmp_path)
    assert code == 1
    assert "data-00001-000.safetensors" in "".join(out.split())
    code, out, _ = mixle("checkpoint", "list", tmp_path, "--json")
    rows = json.loads(out)
    assert code == 1
    assert [(row["step"], row["valid"]) for row in rows] == [(1, True), (2, False)]
    assert rows[0]["problem"] is None
    assert rows[0]["bytes"] > 0
    assert "ENOENT" in rows[1]["problem"]


def test_show_folds_tensors_by_pattern_and_prints_values_owners_and_versions(mixle, tmp_path, save):
    save(tmp_path, 1)
    step = save(tmp_path, 2)
    for place in (tmp_path, step):
        code, out, _ = mixle("checkpoint", "show", place)
        assert code == 0
        assert out.startswith("step 2, ")
        assert "crc32 of every chunk; written by mixle-core 0.1.0, torch " in out
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
        assert ["layers.0.weight", "1", "[8, 6]", "parameter float32, exp_avg float32", "2", "-", "384 B"] in rows
        assert ["rng.0", "1", "[64]", "opaque uint8", "1", "-", "64 B"] in rows
        assert "\nplan: 'dp_shard=2'\nloader: {'epoch': 3, 'seed': (1, None)}\n" in out
    part = begin(tmp_path, 3)
    names = [f"layers.{i}.weight" for i in range(4)]
    records = write_data(part, data_file(0), [Piece(name, "parameter", (2,), (0,), torch.ones(2)) for name in names])
    commit(part, records, {"owners": dict.fromkeys(names, "backend [a]"), "long": "x" * 1000})
    code, out, _ = mixle("checkpoint", "show", tmp_path)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert rows == [["layers.*.weight", "4", "[2]", "parameter float32", "1", "backend [a]", "32 B"]]
    assert "(1002 characters; --json shows all)" in out
    assert mixle("checkpoint", "show", tmp_path, "--by-tensor")[1].count("backend [a]") == 4
    shown = json.loads(mixle("checkpoint", "show", tmp_path, "--json")[1])
    assert shown["tensors"]["layers.3.weight"] == {"parameter": {"dtype": "float32", "shape": [2], "chunks": 1, "bytes": 8}}
    assert (shown["step"], len(shown["values"]["long"]), shown["checksum"]) == (3, 1000, "crc32")


def test_verify_reads_every_byte_and_names_what_is_wrong(mixle, tmp_path, save):
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    code, out, _ = mixle("checkpoint", "verify", tmp_path)
    assert code == 0
    assert [line.split(":")[:2] for line in out.splitlines()] == [["step-00000001", " whole"], ["step-00000002", " whole"]]
    damage(second)
    assert mixle("checkpoint", "list", tmp_path)[0] == 0, "a list reads no contents"
    code, out, _ = mixle("checkpoint", "verify", tmp_path)
    assert code == 1
    assert f"step-00000002: DAMAGED: {second}: 1 of its 11 chunks cannot be believed: {second}/data-00001-000.safetensors: " in out
    assert "step-00000001: whole" in out
    assert mixle("checkpoint", "verify", first)[0] == 0
    code, out, _ = mixle("checkpoint", "verify", second, "--json")
    assert code == 1
    (row,) = json.loads(out)
    assert (row["valid"], row["path"]) == (False, str(second))
    assert "data-00001-000.safetensors" in row["problem"]


def test_verify_and_show_of_a_broken_manifest_exit_1_and_other_directories_2(mixle, tmp_path, save):
    step = save(tmp_path / "root", 1)
    damage(step, "metadata.json")
    for command in ("verify", "show"):
        code, out, err = mixle("checkpoint", command, step)
        assert code == 1
        assert f"{step}/metadata.json: " in out + err
    (step / "_SUCCESS").unlink()
    code, out, _ = mixle("checkpoint", "verify", step)
    assert code == 1
    assert "_SUCCESS: missing" in out
    code, _, err = mixle("checkpoint", "show", tmp_path / "root")
    assert code == 2
    assert "no step in it is whole" in err
    assert mixle("checkpoint", "verify", tmp_path / "nowhere")[0] == 2
    assert mixle("checkpoint", "list", tmp_path / "nowhere")[0] == 2


def test_a_long_verification_shows_a_bar(mixle, tmp_path, save, monkeypatch):
    save(tmp_path, 1)
    assert mixle("checkpoint", "verify", tmp_path)[2] == ""
    monkeypatch.setattr(checkpoints, "_SLOW_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "verifying step-00000001" in mixle("checkpoint", "verify", tmp_path)[2]


def test_to_verify_nothing_is_bad_input(mixle, tmp_path):
    code, _, err = mixle("checkpoint", "verify", tmp_path)
    assert code == 2 and err == f"mixle: {tmp_path}: no step to verify; expected the directory of a run, or a step\n"


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_no_process_group_is_made_and_no_plugin_is_loaded(tmp_path, save, command):
    save(tmp_path, 1)
    code = f"""
import sys
sys.argv = ["mixle", "checkpoint", {command!r}, {str(tmp_path)!r}]
from mixle_core.cli import main
try:
    main()
finally:
    import torch.distributed
    assert not torch.distributed.is_initialized()
    assert not [name for name in sys.modules if name.startswith("mixle_") and not name.startswith("mixle_core")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

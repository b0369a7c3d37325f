"""`mixle infer-layout` on launched ranks, and `--layout FILE` on the commands that take a plan."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import mixle_command

HERE = Path(__file__).parent
NARROW = "dtensor-tp,torch-ddp,torch-fsdp2"


def mixle(*words: str, cwd: Path = HERE, plugins: str | None = NARROW) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(HERE)} | ({} if plugins is None else {"MIXLE_PLUGINS": plugins})
    return mixle_command(*words, cwd=cwd, env=env)


REFERENCE = ["--reference", "split_models:reference"]
PLANNED = ["--reference", "split_models:plain"]


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    """A file that the command wrote, and what it said."""
    file = tmp_path_factory.mktemp("layout") / "toy_layout.py"
    done = mixle("infer-layout", "--plan", "split_models:PLAN", *PLANNED, "--tp", "2", "--output", str(file), cwd=file.parent)
    assert done.returncode == 0, done.stderr
    return file, done.stdout


def test_a_plan_for_the_forward_becomes_a_layout(layout):
    file, said = layout
    assert said.splitlines()[-1].startswith(
        f"{file}: 17 parameters in 6 patterns; prove it: mixle verify --model split_models:plain --tp 2 "
    )
    source = file.read_text()
    assert "measured by `mixle infer-layout` (parallelize_module" in source
    assert "split_models:PLAN, torch 2." in " ".join(source.split())


@pytest.mark.parametrize("plan", [["--tp", "2"], ["--tp", "2", "--dp-shard", "2"]], ids=["tp2", "dp_shard2-tp2"])
def test_verify_takes_the_file_on_every_rank(layout, plan):
    done = mixle("verify", "--model", "split_models:plain", *plan, "--layout", str(layout[0]), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["passed"] is True
    assert report["error"] <= 1e-5


def test_explain_takes_the_file(layout):
    done = mixle("explain", "--model", "split_models:plain", "--tp", "2", "--layout", str(layout[0]))
    assert done.returncode == 0, done.stderr
    assert "tp: Replica(partial)" in done.stdout


def test_a_target_as_json():
    done = mixle("infer-layout", "split_models:by_hand", *REFERENCE, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["passed"], told["refusals"]) == (True, [])
    assert told["findings"]["blocks.0.norm.weight"]["role"] == "Replica(partial)"
    assert told["findings"]["blocks.0.norm.weight"]["evidence"].startswith("the ranks' gradients add up")
    compile(told["source"], "layout.py", "exec")


def test_what_no_layout_says_is_a_line_and_exit_1(tmp_path):
    file = tmp_path / "layout.py"
    done = mixle("infer-layout", "split_models:other_values", *REFERENCE, "--output", str(file))
    assert done.returncode == 1, done.stderr
    first, second = done.stdout.splitlines()[-2:]
    assert first == "no layout: 1 found that no role or boundary says"
    assert second.startswith("  blocks.1.gate_up.weight: index 3 along dim 0 of rank 1's")
    assert not file.exists()
    assert "exit code" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (REFERENCE, "give TARGET, which builds the parallel model, or --plan, which parallelises the reference"),
        (["split_models:by_hand", "--plan", "split_models:PLAN", *REFERENCE], "give TARGET, which builds the parallel model, or --plan"),
        (["split_models:nobody", *REFERENCE], "module 'split_models' has no 'nobody'"),
        (["split_models:by_hand", "--reference", "split_models"], "--reference 'split_models': expected module:callable"),
        (["--plan", "split_models:VOCAB", *PLANNED], "--plan split_models:VOCAB is a int; expected a dict from patterns to torch's"),
        (["--plan", "split_models:NOTHING", *PLANNED], "--plan split_models:NOTHING: module 'split_models' has no attribute 'NOTHING'"),
        (["--plan", "split_models:MISSPELT", *PLANNED], "--plan split_models:MISSPELT: Parallelize plan key 'upp' could not be resolved"),
        (["split_models:odd_function", *REFERENCE], "other values than the reference's [2, 16, 32]"),
        (["targets:not_a_model", *REFERENCE], "TARGET: the callable returned int; expected a torch.nn.Module"),
        (
            ["split_models:by_hand", *REFERENCE, "--output", "/nowhere/layout.py"],
            "--output /nowhere/layout.py: there is no directory /nowhere",
        ),
        (["split_models:by_hand", *REFERENCE, "--tp", "1"], "1 is not in the range x>=2"),
    ],
)
def test_bad_input_is_one_line(words, said):
    done = mixle("infer-layout", *words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


FILES = {
    "missing.py": (None, "--layout {file}: there is no such file; `mixle infer-layout --output {file}` writes one"),
    "broken.py": ("import nowhere_at_all\n", "--layout {file} failed to import: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    "hookless.py": ("WHOLE = 1\n", "--layout {file} has no hook; expected a function declare_layout marked with @hookimpl of mixle_core"),
    "torch-ddp.py": ("", "--layout {file}: a plugin named 'torch-ddp' is installed; give the file another name"),
    "layout.txt": ("WHOLE = 1\n", "--layout {file}: expected a Python file, with a name that ends in .py"),
    "misspelt.py": (
        "from mixle_core import hookimpl\n\n@hookimpl\ndef declare_layouts(model):\n    return None\n",
        "plugin misspelt (passed in code) breaks the contract of the hooks: hook 'declare_layouts' does not exist",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_layout_is_one_line(name, tmp_path):
    file, (text, said) = tmp_path / name, FILES[name]
    if text is not None:
        file.write_text(text)
    done = mixle("explain", "--model", "split_models:plain", "--tp", "2", "--layout", str(file))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"mixle: {said.format(file=file)}"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_beside_an_installed_layout_of_the_model_is_a_conflict(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mixle_core import ModelLayout, ModuleLayout, Replica, hookimpl\n\n\n@hookimpl\ndef declare_layout(model):\n"
        '    return ModelLayout(axis="tp", modules={"model.norm": ModuleLayout(parameters={"weight": Replica("complete")})})\n'
    )
    done = mixle("explain", "--model", "qwen3:tiny", "--tp", "2", "--layout", str(file), plugins=None)
    assert done.returncode == 2, done.stderr
    assert "model.norm.weight: claimed by mine (passed in code) (model.norm.weight) and qwen3 (mixle-qwen3" in done.stderr
    assert "or leave one plugin out of MIXLE_PLUGINS" in done.stderr

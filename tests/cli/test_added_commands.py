"""Commands that other distributions add by entry point: run with a plan on its ranks, and what becomes of broken ones."""

import json
import math
import subprocess
import sys

import pytest

GOOD = """
import click

@click.command("greet")
@click.option("--name", default="nobody")
@click.option("--code", type=int, default=None)
def greet(context, **options):
    "Say who was asked for."
    if context.first_rank:
        click.echo(f"{options['name']}: {context.plan.describe()}, {context.backend}, {type(context.build()).__name__}, {context.as_json}")
    return options["code"]
"""


@pytest.fixture
def add(tmp_path, monkeypatch):
    """Put a distribution with one command on the path."""

    def make(distribution, code, command="greet", attribute="greet"):
        place = tmp_path / distribution
        module = f"{distribution}_{tmp_path.name}".replace("-", "_")  # a name that no other test has imported
        info = place / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mixle.commands]\n{command} = {module}:{attribute}\n")
        (place / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(place)
        return place

    return make


def test_an_added_command_gets_the_plan_and_the_model_beside_its_own_options(mixle, add):
    add("mixle-greet", GOOD)
    code, out, _ = mixle("greet", "--model", "qwen3:tiny", "--name", "ann", "--accumulation", "2", "--backend", "torch_native", "--json")
    assert (code, out) == (0, "ann: one process, ('torch_native',), Qwen3ForCausalLM, True\n")
    assert mixle("greet", "--model", "qwen3:tiny", "--code", "1")[0] == 1
    code, out, _ = mixle("greet", "--help")
    assert code == 0
    assert all(word in out for word in ("Say who was asked for.", "--name", "--dp-shard", "--model"))


def test_an_added_command_runs_on_every_rank_of_its_plan(add, monkeypatch):
    place = add("mixle-greet", GOOD.replace("if context.first_rank:", "if True:"))
    monkeypatch.setenv("PYTHONPATH", str(place))
    command = [sys.executable, "-c", "from mixle_core.cli import main; main()", "greet", "--model", "qwen3:tiny", "--dp-shard", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["nobody: dp_shard=2, None, Qwen3ForCausalLM, False"] * 2


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import nowhere_at_all",
            "the command 'greet' of mixle-bad failed to import: ModuleNotFoundError: No module named 'nowhere_at_all'; way out: ",
        ),
        ("greet = 7", "the command 'greet' of mixle-bad is a int; expected a click.Command with a callback"),
    ],
)
def test_a_broken_command_is_one_line_and_leaves_the_others_and_the_help_alone(mixle, add, code, said):
    add("mixle-bad", code)
    status, _, err = mixle("greet", "--model", "qwen3:tiny")
    assert status == 2
    assert said in err
    assert len(err.splitlines()) == 1
    status, out, _ = mixle("--help")
    assert status == 0
    assert "broken: the command 'greet' of mixle-bad" in " ".join(out.split())
    assert mixle("explain", "--model", "qwen3:tiny", "--json")[0] == 0


def test_a_command_that_returns_no_exit_code_is_refused(mixle, add):
    add("mixle-greet", GOOD.replace('return options["code"]', "return 'done'"))
    status, _, err = mixle("greet", "--model", "qwen3:tiny")
    assert (status, err) == (2, "mixle: the command returned str; expected an exit code or None\n")


def test_two_distributions_with_one_command_are_an_error_that_names_both(mixle, add):
    add("mixle-one", GOOD)
    add("mixle-two", GOOD)
    status, _, err = mixle("greet", "--model", "qwen3:tiny")
    assert status == 2
    assert "two distributions add the command 'greet': " in err
    assert "mixle-one" in err
    assert "mixle-two" in err
    assert "way out: uninstall one of them" in err


def test_a_command_that_nobody_has_says_what_there_is(mixle):
    status, _, err = mixle("trian", "--model", "qwen3:tiny")
    assert status == 2
    assert err.startswith("mixle: no command 'trian'; there are audit, checkpoint, explain, infer-layout, plugins, train, verify; ")


def test_tables_are_saved_as_markdown_or_json(mixle, tmp_path):
    for suffix in ("md", "json"):
        code, _, _ = mixle("explain", "--model", "qwen3:tiny", "--dp-shard", "2", "--tp", "2", "--save", str(tmp_path / f"table.{suffix}"))
        assert code == 0
    lines = (tmp_path / "table.md").read_text().splitlines()
    table = json.loads((tmp_path / "table.json").read_text())
    assert lines[0] == f"Ownership of 25 trainable parameters, plan dp_shard=2 x tp=2, digest {table['digest'][:16]}"
    row = next(line for line in lines if "q_norm" in line).strip("| ").split(" | ")
    assert row[:4] == ["model.layers.\\*.self_attn.q_norm.weight", "2", "torch-fsdp2", "tp: Replica(partial)"]
    assert row[4:] == ["dp_shard tp", "sum over dp_shard then tp, kept sharded", "192 B"]
    assert len(table["rows"]) == 25
    code, _, err = mixle("explain", "--model", "qwen3:tiny", "--save", str(tmp_path / "table.txt"))
    assert code == 2
    assert "table.txt: expected a name that ends in .md or .json" in err
    code, _, err = mixle("explain", "--model", "qwen3:tiny", "--save", str(tmp_path / "no" / "table.md"))
    assert code == 2
    assert "could not be written: No such file or directory" in err


def test_training_saves_table_and_receipts_and_shows_a_sample(mixle, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    arguments = ["--model", "qwen3:tiny", "--data", str(tmp_path / "text.txt"), "--sequence-length", "32", "--batch-size", "4"]
    saved = ["--save-table", str(tmp_path / "t.md"), "--save-receipts", str(tmp_path / "r.csv")]
    code, out, _ = mixle("train", *arguments, *saved, "--epochs", "1", "--sample", "5", "--accumulation", "2")
    assert code == 0
    assert "held out: " in out
    assert "a sample:\ndef " in out
    assert (tmp_path / "t.md").read_text().startswith("Ownership of 25 trainable parameters, plan one process")
    train_ids = 200 * 44 + 1 - (200 * 44 + 1) // 25  # the bytes and the boundary, without what is held out
    batches = math.ceil(math.ceil((train_ids - 1) / 32) / 4)
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 1 + math.ceil(batches / 2)
    for option, name, suffix in (("--save-table", "t.txt", ".md"), ("--save-receipts", "r.txt", ".csv")):
        code, _, err = mixle("train", *arguments, option, str(tmp_path / name))
        assert code == 2
        assert f"{name}: expected a name that ends in " in err
        code, _, err = mixle("train", *arguments, option, str(tmp_path / "no" / f"t{suffix}"))
        assert code == 2
        assert err.startswith(f"mixle: {tmp_path / 'no'}/t{suffix}: there is no directory ")
    code, _, err = mixle("train", *arguments, "--steps", "2", "--epochs", "1")
    assert (code, err) == (2, "mixle: --steps 2 and --epochs 1: give one of them\n")
    code, _, err = mixle("train", *arguments, "--lr", "-1")
    assert code == 2
    assert "-1.0 is not in the range x>=0" in err

"""`mixle audit` on real ranks: planted faults of every kind, clean models of torch, and the fault in the installed transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import mixle_command

import mixle_core as mx

sys.path.insert(0, str(Path(__file__).parent))
import targets

from mixle_core.audit import audit
from mixle_core.testing import run_ranks

HERE = Path(__file__).parent


def window(model, data_rank: int = 0, data_size: int = 1):
    def run(batches):
        model.zero_grad()
        for ids in batches:
            mine = ids.chunk(data_size)[data_rank]
            logits = model(mine)[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
            (loss / len(batches)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    return run


def rows(number: int) -> list[torch.Tensor]:
    return [torch.randint(0, targets.VOCAB, (4, 8), generator=torch.Generator().manual_seed(n)) for n in range(number)]


def audited(name: str, number: int, data_parallel: bool):
    torch.set_num_threads(1)
    model = getattr(targets, name)()
    place = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if data_parallel else (0, 1)
    report = audit(window(model, *place), window(targets.reference()), rows(number))
    return {name: (verdict.kind, verdict.ratio) for name, verdict in report.wrong.items()}, str(report)


PLANTED = {
    "missing_sum": "missing sum",
    "reduced_twice": "reduced twice",
    "averaged": "averaged instead of summed",
    "scaled": "scaled by a constant",
    "drifting": "copies drifting apart",
    "never_trained": "never trained",
    "nonsense": "not explained",
}


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(name, number):
    for outcome in run_ranks(audited, 2, name, number, False, reuse=True):
        wrong, text = outcome.value
        assert {parameter: kind for parameter, (kind, _) in wrong.items()} == {"scale": PLANTED[name]}, text
        assert text.startswith(f"scale: {PLANTED[name]}")


def test_a_gradient_that_is_reduced_again_at_every_microbatch():
    assert [outcome.value[0] for outcome in run_ranks(audited, 2, "reduced_again", 1, False, reuse=True)] == [{}, {}]
    for number in (2, 4):
        for outcome in run_ranks(audited, 2, "reduced_again", number, False, reuse=True):
            assert {name: kind for name, (kind, _) in outcome.value[0].items()} == {"scale": "reduced again at every microbatch"}


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize(("name", "data_parallel"), [("clean", False), ("ddp", True), ("fsdp2", True)])
def test_a_clean_model_raises_no_alarm(name, data_parallel, number):
    for outcome in run_ranks(audited, 2, name, number, data_parallel, reuse=True):
        wrong, text = outcome.value
        assert wrong == {}
        assert "gradients are right" in text


def renamed(batches):
    return {name.replace("scale", "wrapped.rescale"): gradient for name, gradient in window(targets.reference())(batches).items()}


def test_names_that_the_reference_does_not_have_are_asked_for():
    with pytest.raises(mx.UsageError, match=r"the reference has no parameter 'wrapped.rescale' .*; pass names"):
        audit(renamed, window(targets.reference()), rows(1))


@pytest.mark.parametrize(
    "names", [{"wrapped.rescale": "scale"}, lambda name: name.replace("wrapped.rescale", "scale")], ids=["mapping", "function"]
)
def test_names_lead_from_the_parallel_model_to_the_reference(names):
    report = audit(renamed, window(targets.reference()), rows(2), names)
    assert (report.wrong, len(report.verdicts)) == ({}, 6)


def test_no_microbatch_is_refused():
    with pytest.raises(mx.UsageError, match="audit: no microbatch"):
        audit(lambda batches: {}, lambda batches: {}, [])


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return mixle_command("audit", *words, cwd=HERE)


def test_the_command_says_what_is_wrong_and_exits_1():
    done = command("targets:reduced_again", "--reference", "targets:reference", "--tp", "2", "--microbatches", "1,2")
    assert done.returncode == 1, done.stderr
    assert "1 microbatch: all 6 gradients right" in done.stdout
    assert "2 microbatches: 1 of 6 gradients wrong" in done.stdout
    assert "scale" in done.stdout and "reduced again at every microbatch" in done.stdout
    assert "exit code" not in done.stderr


def test_the_command_passes_a_clean_model_as_json():
    done = command("targets:ddp", "--reference", "targets:reference", "--dp", "2", "--microbatches", "1,2", "--json", "--sync", "last")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"passed": True, "windows": [{"microbatches": n, "wrong": {}} for n in (1, 2)]}


def test_what_has_no_gradient_is_json_all_the_same():
    done = command("targets:never_trained", "--reference", "targets:reference", "--tp", "2", "--microbatches", "1", "--json")
    assert done.returncode == 1, done.stderr
    (window,) = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["windows"]
    (verdict,) = window["wrong"].values()
    assert (verdict["kind"], verdict["error"], verdict["ratio"]) == ("never trained", None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["targets:nobody", "--reference", "targets:reference"], "module 'targets' has no 'nobody'"),
        (["targets", "--reference", "targets:reference"], "TARGET 'targets': expected module:callable"),
        (["targets:ddp", "--reference", "targets:not_a_model", "--dp", "2"], "--reference: the callable returned no torch.nn.Module"),
        (["targets:ddp", "--reference", "targets:reference", "--microbatches", "0"], "expected whole numbers of at least 1"),
    ],
)
def test_bad_input_is_one_line(words, said):
    done = command(*words)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


SHARDED = ["--dp", "2", "--sync", "last", "--microbatches", "1,2"]


@pytest.mark.parametrize(("words", "numbers"), [([], [1, 2, 4]), (SHARDED, [1, 2])], ids=["tp2", "fsdp2xtp2-put-off"])
def test_the_fault_in_transformers_is_found_unaided(words, numbers):
    """C01: q/k norms of Qwen3 under its TP plan: right with one microbatch, reduced again at each of several."""
    done = command("qwen3_by_transformers:parallel", "--reference", "qwen3_by_transformers:reference", "--tp", "2", "--json", *words)
    assert done.returncode == 1, done.stderr
    windows = json.loads(done.stdout.splitlines()[-1])["windows"]
    assert [(window["microbatches"], len(window["wrong"])) for window in windows] == [(n, 4 if n > 1 else 0) for n in numbers]
    for window in windows[1:]:
        assert {verdict["kind"] for verdict in window["wrong"].values()} == {"reduced again at every microbatch"}
        assert all("q_norm" in name or "k_norm" in name for name in window["wrong"])


def test_the_library_form_loads_neither_the_runtime_nor_a_plugin():
    """It works inside anybody's test, next to whatever trains there."""
    code = "import sys; from mixle_core.audit import audit; print([n for n in sys.modules if n.startswith('mixle') and 'runtime' in n])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


class Table:
    """Two ranks hold the rows of one matrix, four hold two copies of them."""

    @staticmethod
    def whole(name, pieces):
        half = len(pieces) // 2 or 1
        return {rank: torch.cat([pieces[rank % half], pieces[rank % half + half]]) for rank in range(len(pieces))}


def cut(values):
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return values.chunk(2)[rank * 2 // size]


def audited_by_table(change: float):
    """Of two copies of a cut gradient the second may be changed on one rank."""
    wanted = torch.arange(1.0, 9.0)
    mine = cut(wanted) + change * (torch.distributed.get_rank() == 3)
    report = audit(lambda batches: {"w": mine}, lambda batches: {"w": wanted}, [0], whole=Table.whole, tolerance=1e-4)
    return report.wrong.get("w") and report.wrong["w"].kind, report.drifted, report.error


def test_who_knows_how_it_is_cut_says_so_and_copies_are_compared_to_the_bit():
    for outcome in run_ranks(audited_by_table, 4, 0.0, reuse=True):
        assert outcome.value == (None, (), 0.0)
    for outcome in run_ranks(audited_by_table, 4, 1e-6, reuse=True):
        kind, drifted, error = outcome.value
        assert kind is None and drifted == ("w",) and 0 < error < 1e-5
    for outcome in run_ranks(audited_by_table, 4, 1.0, reuse=True):
        assert outcome.value[0] == "copies drifting apart" and outcome.value[1] == ("w",)


def test_zeros_where_one_process_has_no_gradient_are_told_apart():
    report = audit(lambda batches: {"w": torch.zeros(3)}, lambda batches: {"w": None}, [0])
    assert report.wrong == {} and report.zeros == ("w",)

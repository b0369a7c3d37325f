"""`mixle audit` on real ranks: planted faults of every kind, clean models of torch, and the fault in the installed transformers."""

from __future__ import annotations

import itertools
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
from mixle_core.audit.window import _dealt
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


TALL = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
HALF = torch.cat([TALL[:4], torch.zeros(4, 3)])  # no token of the second half
PARALLEL = torch.tensor([2.0, -1.0, 4.0, 3.0])  # in slices of one element, all are alike but for a factor


def dealt(wanted, number, held, factor=1.0, change=0.0):
    """What the audit says where each rank holds the slice that `held` gives it; the last rank's may be changed."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = factor * wanted.chunk(number)[held[rank]] + change * (rank == size - 1)
    report = audit(lambda batches: {"w": mine}, lambda batches: {"w": wanted}, [0])
    return report.wrong.get("w") and (report.wrong["w"].kind, report.wrong["w"].evidence), report.drifted


@pytest.mark.parametrize(
    ("wanted", "number", "held"),
    [
        (TALL, 2, [0, 1]),
        (TALL, 2, [0, 1, 0, 1]),
        (TALL, 2, [0, 0, 1, 1]),
        (TALL, 4, [2, 0, 3, 1]),  # however the ranks are ordered
        (TALL, 2, [0, 1, 1, 0]),
        (HALF, 2, [0, 1]),
        (HALF, 4, [0, 1, 2, 3]),
        (HALF, 4, [3, 1, 0, 2]),
        (torch.zeros(4, 2), 2, [0, 1]),
        (PARALLEL, 4, [1, 3, 0, 2]),
    ],
)
def test_every_slice_is_dealt_out_to_equally_many_ranks(wanted, number, held):
    for outcome in run_ranks(dealt, len(held), wanted, number, held, reuse=True):
        assert outcome.value == (None, ())


@pytest.mark.parametrize(
    ("wanted", "number", "held", "said"),
    [
        (TALL, 2, [0, 0], ["rank 1 holds slice 0 along dim 0, and slice 1 is left for it"]),
        (TALL, 2, [1, 1], ["rank 0 holds slice 1 along dim 0, and slice 0 is left for it"]),
        (HALF, 2, [0, 0], ["rank 1 holds slice 0"]),
        (-HALF.flip(0), 2, [1, 1], ["rank 0 holds slice 1"]),
        (TALL, 2, [0, 0, 0, 0], ["rank 1 holds slice 0", "rank 3 holds slice 0"]),
        (TALL, 4, [0, 1, 2, 2], ["rank 3 holds slice 2 along dim 0, and slice 3 is left for it"]),
        (TALL, 4, [0, 1], ["ranks 0, 1 hold 1/4 of it each"]),
        (TALL, 2, [0, 1, 0], ["ranks 0, 1, 2 hold 1/2 of it each"]),
    ],
)
def test_a_slice_that_no_rank_holds_is_a_wrong_gradient(wanted, number, held, said):
    for outcome in run_ranks(dealt, len(held), wanted, number, held, reuse=True):
        (kind, evidence), _ = outcome.value
        assert kind == "not explained"
        assert all(words in evidence for words in said), evidence


def test_the_other_faults_of_slices_keep_their_names():
    for outcome in run_ranks(dealt, 4, TALL, 2, [0, 1, 0, 1], 2.0, reuse=True):
        assert outcome.value[0][0] == "reduced twice"
    for outcome in run_ranks(dealt, 4, TALL, 2, [0, 1, 0, 1], 1.0, 1.0, reuse=True):
        (kind, evidence), drifted = outcome.value
        assert (kind, drifted) == ("copies drifting apart", ("w",))
        assert evidence.startswith("rank 3 holds something else than slice 1 along dim 0; ranks 1 and 3 differ by")


def test_dealing_out_is_the_best_of_all():
    """Against every way to deal 4 slices to 4 ranks and 2 slices to 6."""
    generator = torch.Generator().manual_seed(0)
    for number, size in [(4, 4), (2, 6)] * 20:
        scores = torch.rand(size, number, generator=generator).tolist()
        ways = set(itertools.permutations(list(range(number)) * (size // number)))
        best = max(sum(scores[rank][index] for rank, index in enumerate(way)) for way in ways)
        found = _dealt(scores, number)
        assert sorted(found) == sorted(list(range(number)) * (size // number))
        assert sum(scores[rank][index] for rank, index in enumerate(found)) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("unused", [{}, {"w": None}], ids=["no-name", "no-gradient"])
def test_a_microbatch_that_does_not_use_a_parameter(unused):
    def run(batches):
        return {"w": torch.ones(2)} if 1 in batches else unused

    report = audit(lambda batches: {"w": 3 * torch.ones(2)}, run, [0, 1])
    assert {name: verdict.kind for name, verdict in report.wrong.items()} == {"w": "scaled by a constant"}

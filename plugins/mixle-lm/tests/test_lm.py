"""`LM` in one process: packed documents against documents by themselves, fit against a hand-written loop, and what is refused."""

import csv
import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mixle_lm import IGNORED, LM, Rows, causal_lm_loss, cosine_schedule, last_token_loss
from structlog.testing import capture_logs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import mixle_core as mx
from mixle_core.testing import ToyLM

VOCAB = 40
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def qwen3(**options):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=1, head_dim=8, **options))


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, **options))


def mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4))


class Recurrent(nn.Module):
    """A language model with a running state, that takes its ids by position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.state = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens):
        return {"logits": self.head(self.state(self.embed(tokens))[0])}


def some_documents(number=7):
    generator = np.random.default_rng(1)
    return [generator.integers(1, VOCAB, length) for length in generator.integers(2, 12, number)]


def by_themselves(model, documents):
    """Summed loss and tokens of documents that never met."""
    total, tokens = torch.zeros(()), 0
    for document in documents:
        ids = torch.tensor(np.asarray(document))[None]
        logits = model(input_ids=ids[:, :-1]).logits
        total = total + F.cross_entropy(logits[0].float(), ids[0, 1:], reduction="sum")
        tokens += len(document) - 1
    return total, tokens


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("build", [qwen3, llama])
def test_packed_documents_train_as_if_each_were_alone(build, attention, cache):
    model = build(attn_implementation=attention, use_cache=cache)
    documents = some_documents()
    rows = Rows(documents, length=sum(map(len, documents)) - 1, vocab_size=VOCAB)
    batch = {name: torch.from_numpy(values) for name, values in rows.take(np.arange(1)).items()}
    loss, tokens = causal_lm_loss(model, batch)
    loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    wanted, wanted_tokens = by_themselves(model, documents)
    wanted.backward()
    assert tokens == wanted_tokens
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert float((packed[name] - parameter.grad).norm() / parameter.grad.norm()) < 1e-5, name


class FarBack(nn.Module):
    """Looks 40 positions back and nowhere else."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.head(hidden + F.pad(hidden, (0, 0, 40, 0))[:, : hidden.shape[1]])


def test_documents_that_look_far_back_are_seen_in_rows_as_long_as_those_of_training():
    lm = LM(FarBack(), plugins={})
    assert lm.fit(some_documents(40), sequence_length=128, batch_size=1, steps=1).documents_separate is False


class Holder(nn.Module):
    """A model that holds another one under the name that wrappers use, and takes positions itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.module = nn.Embedding(VOCAB, 8)
        self.places = nn.Embedding(64, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids, position_ids=None):
        assert position_ids is not None
        return self.head(self.module(input_ids) + self.places(position_ids))


def test_a_model_that_holds_a_module_is_no_wrapper_of_it():
    assert LM(Holder(), plugins={}).fit(some_documents(), sequence_length=16, batch_size=2, steps=1).documents_separate is True


def test_the_vocabulary_can_be_said():
    assert LM(Holder(), vocab_size=30, plugins={}).vocab_size == 30
    with pytest.raises(mx.UsageError, match="token id 35 is outside the model's vocabulary of 30"):
        LM(Holder(), vocab_size=30, plugins={}).fit([35, 1], steps=1)


@pytest.mark.parametrize(("build", "apart"), [(qwen3, True), (llama, True), (mamba, False), (Recurrent, False), (partial(ToyLM, 1), True)])
def test_whether_a_model_keeps_documents_apart_is_seen(build, apart):
    lm = LM(build(), plugins={})
    documents = [document % 32 for document in some_documents()]
    with capture_logs() as logs:
        result = lm.fit(documents, sequence_length=16, batch_size=2, steps=1)
    assert result.documents_separate is apart
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ([] if apart else ["documents_attend_to_each_other"])
    assert LM(build(), plugins={}).fit(np.ones(40, dtype=int), sequence_length=16, batch_size=2, steps=1).documents_separate is None


def test_fit_equals_a_hand_written_loop_with_windows_across_epochs_and_a_short_last_one():
    ids = np.random.default_rng(0).integers(1, VOCAB, 5 * 8 + 4)
    lm, reference = LM(qwen3(), plugins={}), qwen3()
    schedule = cosine_schedule(4, warmup=1)
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)  # above the rounding of gradients whose true value is zero
    result = lm.fit(
        ids,
        sequence_length=8,
        batch_size=2,
        epochs=2,
        gradient_accumulation_steps=4,
        optimizer=adamw,
        schedule=schedule,
        max_grad_norm=0.5,
    )
    rows = Rows(ids, length=8, vocab_size=VOCAB)
    optimizer = adamw(reference.parameters())
    scheduler = schedule(optimizer)
    batches = []
    for epoch in range(2):
        order = np.random.default_rng((0, epoch)).permutation(6)
        batches += [order[start : start + 2] for start in range(0, 6, 2)]
    for receipt, window in zip(result.receipts, (batches[:4], batches[4:]), strict=True):
        losses, tokens = [], 0
        for picked in window:
            batch = {name: torch.from_numpy(values) for name, values in rows.take(picked).items()}
            logits = reference(input_ids=batch["input_ids"]).logits
            losses.append(F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum", ignore_index=IGNORED))
            tokens += int((batch["targets"] != IGNORED).sum())
        (sum(losses) / tokens).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert receipt.loss == pytest.approx(float(sum(losses).detach()) / tokens, rel=1e-5)
        assert receipt.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert receipt.learning_rate == pytest.approx(optimizer.param_groups[0]["lr"])
        assert (receipt.num_tokens, receipt.num_examples, receipt.accumulation) == (tokens, 2 * len(window), len(window))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(lm.model.named_parameters(), reference.parameters(), strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 1e-5, name
    assert result.num_tokens == 2 * (len(ids) - 1)


def test_recomputation_and_a_cache_by_default_do_not_meet():
    ids = np.random.default_rng(0).integers(1, VOCAB, 100)
    found = []
    for checkpointing in (False, True):
        lm = LM(llama(attn_implementation="eager", use_cache=True), plugins={})
        result = lm.fit(ids, sequence_length=16, batch_size=4, steps=2, activation_checkpointing=checkpointing)
        found.append([(receipt.loss, receipt.grad_norm) for receipt in result.receipts])
    assert found[0] == [pytest.approx(pair, rel=1e-6) for pair in found[1]]


def test_one_target_a_row_trains_on_the_last_position_alone():
    model = qwen3()
    ids = np.random.default_rng(0).integers(1, VOCAB, (6, 9))
    batch = {name: torch.from_numpy(v) for name, v in Rows(ids, vocab_size=VOCAB, dense=False).take(np.arange(6)).items()}
    loss, tokens = last_token_loss(model, batch)
    logits = model(input_ids=torch.from_numpy(ids[:, :-1])).logits[:, -1]
    assert tokens == 6
    assert float(loss.detach()) == pytest.approx(
        float(F.cross_entropy(logits, torch.from_numpy(ids[:, -1]), reduction="sum").detach()), rel=1e-6
    )
    result = LM(model, plugins={}).fit(ids, dense=False, batch_size=3, epochs=1)
    assert [(receipt.num_tokens, receipt.num_examples) for receipt in result.receipts] == [(3, 3), (3, 3)]


def test_a_second_fit_goes_on_and_another_plan_is_refused():
    lm = LM(qwen3(), plugins={})
    ids = np.random.default_rng(0).integers(1, VOCAB, 200)
    first = lm.fit(ids, sequence_length=8, batch_size=4, steps=3)
    second = lm.fit(ids, sequence_length=8, batch_size=4, steps=2)
    assert [receipt.update for receipt in (*first.receipts, *second.receipts)] == [0, 1, 2, 3, 4]
    with pytest.raises(mx.UsageError, match=r"^the model is cut and owned as one process; fit under the same ones, or build a new LM$"):
        lm.fit(ids, sequence_length=8, steps=1, gradient_accumulation_steps=2)


@pytest.mark.parametrize("kind", ["array", "path", "text"])
def test_a_row_has_128_inputs_unless_told_or_what_rows_have(tmp_path, kind):
    ids, rows = np.ones(300, dtype=int), np.ones((3, 9), dtype=int)
    for name, values in (("ids", ids), ("rows", rows)):
        np.save(tmp_path / f"{name}.npy", values)
    paths = [tmp_path / "ids.npy", tmp_path / "rows.npy"]
    stream, cut = {"array": [ids, rows], "path": paths, "text": [str(path) for path in paths]}[kind]
    tokens = [receipt.num_tokens for receipt in LM(qwen3(), plugins={}).fit(stream, batch_size=1).receipts]
    assert sorted(tokens) == [43, 128, 128]
    assert [receipt.num_tokens for receipt in LM(qwen3(), plugins={}).fit(cut, batch_size=3).receipts] == [24]
    with pytest.raises(mx.UsageError, match="sequence_length=0: expected at least 1 input a row"):
        LM(qwen3(), plugins={}).fit(stream, sequence_length=0)


def test_going_on_from_a_loader_state_trains_on_what_is_left():
    ids = np.random.default_rng(0).integers(1, VOCAB, 81)
    whole = LM(qwen3(), plugins={}).fit(ids, sequence_length=8, batch_size=2, epochs=1)
    lm = LM(qwen3(), plugins={})
    lm.fit(ids, sequence_length=8, batch_size=2, steps=2)
    rest = lm.fit(ids, sequence_length=8, batch_size=2, epochs=1, loader_state=lm.loader.state_dict())
    assert (len(whole.receipts), len(rest.receipts)) == (5, 3)


def test_evaluate_is_the_mean_over_every_target_and_changes_nothing():
    lm = LM(qwen3(), plugins={})
    ids = np.random.default_rng(0).integers(1, VOCAB, 30)
    before = [p.clone() for p in lm.model.parameters()]
    found = lm.evaluate(ids, sequence_length=29)
    total, tokens = by_themselves(lm.model, [ids])
    assert found == pytest.approx(float(total.detach()) / tokens, rel=1e-6)
    assert lm.evaluate(ids, sequence_length=29, batch_size=1) == pytest.approx(found, rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(before, lm.model.parameters(), strict=True))
    assert lm.model.training is not lm.session.module.training or lm.model is lm.session.module


def test_generate_takes_the_likeliest_or_draws_and_stops():
    lm = LM(qwen3(), plugins={})
    greedy = lm.generate([1, 2, 3], max_new_tokens=6)
    ids = [1, 2, 3]
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(lm.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert greedy == ids[3:]
    assert lm.generate([1, 2, 3], max_new_tokens=6, temperature=5.0, top_k=1) == greedy
    drawn = [lm.generate([1, 2, 3], max_new_tokens=12, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert lm.generate([1, 2, 3], max_new_tokens=6, eos_token_id=greedy[2]) == greedy[: greedy.index(greedy[2]) + 1]


def test_a_receipt_without_finite_numbers_is_still_json(tmp_path):
    lm = LM(qwen3(), plugins={})
    with torch.no_grad():
        lm.model.lm_head.weight[0, 0] = float("nan")
    result = lm.fit(np.ones(50, dtype=int), sequence_length=8, batch_size=2, steps=1)
    assert result.receipts[0].skipped.startswith("non-finite gradient")
    result.save(tmp_path / "run.jsonl")
    assert json.loads((tmp_path / "run.jsonl").read_text(), parse_constant=pytest.fail)["loss"] is None


def test_receipts_are_saved_as_a_table_or_as_json_lines(tmp_path):
    result = LM(qwen3(), plugins={}).fit(np.ones(50, dtype=int), sequence_length=8, batch_size=2, epochs=1)
    result.save(tmp_path / "run.csv")
    result.save(tmp_path / "run.jsonl")
    with (tmp_path / "run.csv").open() as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len(table) == len(lines) == len(result.receipts) == 4
    assert float(table[2]["loss"]) == lines[2]["loss"] == result.receipts[2].loss
    assert table[0]["owners"] == "local:0:0"
    with pytest.raises(mx.UsageError, match=r"run\.txt: expected a name that ends in \.jsonl or \.csv$"):
        result.save(tmp_path / "run.txt")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"steps": 1, "epochs": 1}, mx.UsageError, "steps=1 and epochs=1: give one of them"),
        ({"steps": 0}, mx.UsageError, "steps=0: expected a whole number of at least 1"),
        ({"epochs": 1.5}, mx.UsageError, "epochs=1.5: expected a whole number of at least 1"),
        ({"batch_size": 2, "microbatches": 4}, mx.UsageError, "batch_size=2 for microbatches=4"),
        (
            {"dp_shrad": 2},
            mx.UsageError,
            "fit: got an unexpected keyword argument 'dp_shrad'; expected its own options or fields of ParallelPlan",
        ),
        ({"tp": 0}, mx.PlanError, "tp=0: expected an integer of at least 1"),
        (
            {"distributed": True},
            mx.UsageError,
            "distributed=True with a plan of one process: say how the ranks are used, such as dp_shard=8",
        ),
        (
            {"dp_shard": 8},
            mx.UsageError,
            "dp_shard=8 needs 8 processes: pass distributed=True and launch with: torchrun --nproc-per-node 8 ",
        ),
        (
            {"tp": 2, "dense": False},
            mx.CapabilityError,
            "one target a row (dense=False, --last-position) is data parallel only, not tp=2; leave out one of them",
        ),
        ({"cp": 2, "pp": 2, "dense": False}, mx.CapabilityError, "not pp=2, cp=2;"),
        ({"ep": 2, "dp_shard": 2, "dense": False}, mx.CapabilityError, "not ep=2;"),
        ({"max_grad_norm": 0}, mx.UsageError, "max_grad_norm=0: expected a number above 0, or None"),
    ],
)
def test_what_fit_refuses_is_one_line(options, error, said):
    with pytest.raises(error) as caught:
        LM(qwen3(), plugins={}).fit(np.ones(50, dtype=int), **{"sequence_length": 8, **options})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen3", "model 'qwen3': expected NAME:SIZE of a plugin, or module:callable"),
        ("nowhere:tiny", "model nowhere:tiny: 'nowhere' is neither a plugin (installed: "),
        (nn.Linear(2, 2), "Linear has neither config.vocab_size nor an embedding; expected a language model over token ids"),
        (7, "LM(int): expected a torch.nn.Module, NAME:SIZE of a plugin, or module:callable"),
    ],
)
def test_what_is_no_language_model_is_refused(model, said):
    with pytest.raises(mx.MixleError) as caught:
        LM(model)
    assert said in str(caught.value)


def test_a_model_may_be_named_by_what_makes_it(tmp_path, monkeypatch):
    (tmp_path / "models_of_a_user.py").write_text("from mixle_core.testing import ToyLM\ndef build():\n    return ToyLM(1)\n")
    monkeypatch.chdir(tmp_path)
    assert LM("models_of_a_user:build", plugins={}).vocab_size == 32
    with pytest.raises(mx.UsageError, match=r"^model models_of_a_user:bild: module 'models_of_a_user' has no 'bild'$"):
        LM("models_of_a_user:bild", plugins={})


def test_a_model_that_returns_no_logits_is_refused():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 4)

        def forward(self, input_ids):
            return self.embed(input_ids).sum()

    with pytest.raises(
        mx.UsageError,
        match=r"^the model returned shape \[\] for ids of shape \[7, 8\]; expected logits of shape \[rows, length, vocabulary\]",
    ):
        LM(Sum(), plugins={}).fit(np.ones(50, dtype=int), sequence_length=8, steps=1)


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ([], {}, "token_ids: empty"),
        ([VOCAB], {}, "prompt: token id 40 is outside the model's vocabulary of 40"),
        ([[1], [2]], {}, "prompt: expected the ids of one text"),
        ([1], {"temperature": -1.0}, "temperature=-1.0: expected 0 (greedy) or above"),
        ([1], {"top_k": 0}, "top_k=0: expected at least 1"),
        ([1], {"temperature": float("inf")}, "temperature=inf: expected 0 (greedy) or above"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number of at least 1"),
        ([1], {"max_new_tokens": 1.5}, "max_new_tokens=1.5: expected a whole number of at least 1"),
        ([1], {"eos_token_id": 40}, "eos_token_id=40: expected an id of the vocabulary of 40"),
    ],
)
def test_what_generate_refuses_is_one_line(prompt, options, said):
    with pytest.raises(mx.UsageError) as caught:
        LM(qwen3(), plugins={}).generate(prompt, **options)
    assert said in str(caught.value)


def test_a_fit_with_nothing_left_is_refused_and_a_state_is_a_mapping():
    lm = LM(qwen3(), plugins={})
    lm.fit(np.ones(50, dtype=int), sequence_length=8, batch_size=2, epochs=1)
    with pytest.raises(mx.UsageError, match="stands at the end of epoch 1 and epochs=1: nothing is left; give more epochs, or steps"):
        lm.fit(np.ones(50, dtype=int), sequence_length=8, batch_size=2, epochs=1, loader_state=lm.loader.state_dict())
    with pytest.raises(mx.UsageError, match=r"^loader state: a str; expected what state_dict\(\) returned$"):
        lm.fit(np.ones(50, dtype=int), sequence_length=8, loader_state="state.json")

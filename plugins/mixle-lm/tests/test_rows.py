"""Rows against a plain re-statement of what packing means, for every kind of input; and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixle_lm import IGNORED, Rows

import mixle_core as mx

VOCAB = 50


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=0, max_size=9), min_size=1, max_size=8), st.integers(1, 7))
def test_every_id_but_the_first_of_each_document_is_a_target_exactly_once_behind_its_predecessor(documents, length):
    """Both ways to say where documents end give the same rows."""
    ended = [[*document, 0] for document in documents]
    stream = np.array([token for document in ended for token in document])
    if len(stream) < 2:
        return
    by_eos = Rows(stream, length=length, vocab_size=VOCAB, eos_token_id=0)
    one_by_one = Rows(ended, length=length, vocab_size=VOCAB)
    batch = by_eos.take(np.arange(len(by_eos)))
    for name, values in one_by_one.take(np.arange(len(one_by_one))).items():
        assert np.array_equal(values, batch[name]), name
    used = batch["targets"] != IGNORED
    pairs = list(zip(batch["input_ids"][used].tolist(), batch["targets"][used].tolist(), strict=True))
    assert pairs == [pair for document in ended for pair in itertools.pairwise(document)]
    inputs = batch["input_ids"].reshape(-1)[: len(stream) - 1]
    assert np.array_equal(inputs, stream[:-1])


def test_positions_restart_with_each_document_and_with_each_row():
    rows = Rows([[1, 2, 3], [4], [5, 6, 7, 8, 9]], length=4, vocab_size=VOCAB)
    batch = rows.take(np.arange(len(rows)))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch["targets"].tolist() == [[2, 3, IGNORED, IGNORED], [6, 7, 8, 9]]


def test_a_document_ends_where_the_iterable_or_the_id_says_so():
    shards = [np.array([1, 2, 0, 5, 6, 0, 7]), np.array([8, 9, 0, 4])]
    batch = Rows(shards, length=10, vocab_size=VOCAB, eos_token_id=0).take(np.arange(1))
    assert batch["targets"].tolist() == [[2, 0, IGNORED, 6, 0, IGNORED, IGNORED, 9, 0, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 0, 0, 1, 2]]


def test_without_documents_every_position_has_a_target_and_the_tail_is_filled_up_without_a_loss():
    batch = Rows(np.arange(1, 8), length=4, vocab_size=VOCAB).take(np.array([1, 0, -1]))
    assert set(batch) == {"input_ids", "targets"}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [1, 2, 3, 4], [0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[6, 7, IGNORED, IGNORED], [2, 3, 4, 5], [IGNORED] * 4]


def test_one_target_a_row_at_its_last_position_and_the_last_row_is_full():
    rows = Rows(np.arange(1, 11), length=4, vocab_size=VOCAB, dense=False)
    batch = rows.take(np.arange(len(rows)))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [6, 7, 8, 9]]
    assert batch["targets"].tolist() == [[IGNORED] * 3 + [target] for target in (5, 9, 10)]


def test_rows_that_come_as_rows_stay_as_they_are_overlapping_views_included():
    ids = np.arange(1, 8)
    rows = Rows(np.lib.stride_tricks.sliding_window_view(ids, 4), vocab_size=VOCAB, dense=False)
    assert (len(rows), rows.length) == (4, 3)
    assert rows.take(np.array([2]))["input_ids"].tolist() == [[3, 4, 5]]
    assert rows.take(np.array([2]))["targets"].tolist() == [[IGNORED, IGNORED, 6]]


@pytest.fixture
def stream():
    return np.random.default_rng(0).integers(1, VOCAB, 101)


@pytest.mark.parametrize("kind", ["int32", "list", "generator", "tensor", "memmap", "path", "uint8"])
def test_every_kind_of_input_gives_the_same_rows(stream, kind, tmp_path):
    np.save(tmp_path / "ids.npy", stream)
    given_ids = {
        "int32": lambda: stream.astype(np.int32),
        "uint8": lambda: stream.astype(np.uint8),
        "list": stream.tolist,
        "generator": lambda: (int(i) for i in stream),
        "tensor": lambda: torch.from_numpy(stream),
        "memmap": lambda: np.load(tmp_path / "ids.npy", mmap_mode="r"),
        "path": lambda: tmp_path / "ids.npy",
    }[kind]()
    rows, wanted = Rows(given_ids, length=7, vocab_size=VOCAB), Rows(stream, length=7, vocab_size=VOCAB)
    assert len(rows) == len(wanted) == 15
    for name, values in rows.take(np.arange(15)).items():
        assert values.dtype == np.int64
        assert np.array_equal(values, wanted.take(np.arange(15))[name])


def test_a_file_is_memory_mapped_and_only_asked_for_rows_are_read(tmp_path):
    np.save(tmp_path / "ids.npy", np.ones(1000, dtype=np.int64))
    assert isinstance(Rows(tmp_path / "ids.npy", length=7, vocab_size=VOCAB).ids, np.memmap)


@pytest.mark.parametrize(
    ("token_ids", "options", "said"),
    [
        (np.array([], dtype=int), {}, "token_ids: empty; expected token ids"),
        ([], {}, "token_ids: empty; expected token ids"),
        ([[], []], {}, "token_ids: only empty documents; expected token ids"),
        (np.array([3]), {}, "token_ids has 1 ids; expected at least 2: an input and a target"),
        (np.arange(4), {"dense": False}, "token_ids has 4 ids; expected at least 5: a row of 4 inputs and its target"),
        (np.array([1, VOCAB]), {}, "token id 50 is outside the model's vocabulary of 50"),
        (np.array([1, -1]), {}, "token id -1 is outside the model's vocabulary of 50"),
        (np.array([1.0, 2.0]), {}, "token_ids: float64 of shape [2]; expected integers of shape [ids] or [rows, ids of a row]"),
        (np.zeros((2, 2, 2), dtype=int), {}, "token_ids: int64 of shape [2, 2, 2]; expected integers"),
        (np.zeros((2, 4), dtype=int), {}, "token_ids of shape [2, 4] are rows of 3 inputs; got sequence_length=4"),
        (np.arange(9), {"length": None, "dense": False}, "token_ids has 9 ids; expected at least 129"),
        (np.arange(9), {"length": 8.5}, "sequence_length=8.5: expected at least 1 input a row"),
        (np.arange(9), {"length": "8"}, "sequence_length='8': expected at least 1 input a row"),
        (np.arange(9), {"length": 0}, "sequence_length=0: expected at least 1 input a row"),
        (np.arange(9), {"eos_token_id": 50}, "eos_token_id=50: expected an id of the vocabulary of 50"),
        (["a", "b"], {}, "expected integers"),
        ([[1, 2], "text"], {}, "expected"),
        ([[[1, 2]]], {}, "token_ids: a document of shape [1, 2]; expected ids of one dimension"),
        (7, {}, "token_ids is a int; expected an array, a tensor, the path of a .npy file, or an iterable of ids or documents"),
        ("nowhere.npy", {}, "token_ids nowhere.npy: not a readable .npy file of integers"),
    ],
)
def test_what_cannot_be_rows_is_one_line(token_ids, options, said):
    with pytest.raises(mx.UsageError) as caught:
        Rows(token_ids, **{"length": 4, "vocab_size": VOCAB, **options})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fingerprints_tell_data_and_cut_apart(stream):
    def mark(ids=stream, **options):
        return Rows(ids, **{"length": 7, "vocab_size": VOCAB, **options}).fingerprint

    changed = stream.copy()
    changed[50] = changed[50] % (VOCAB - 1) + 1
    assert mark() == mark(stream.copy())
    assert len({mark(), mark(changed), mark(length=8), mark(eos_token_id=3), mark(stream[:-1]), mark(dense=False)}) == 6

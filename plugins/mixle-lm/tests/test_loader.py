"""Every row exactly once in each epoch, over any number of data ranks, and after stopping anywhere."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixle_lm import IGNORED, RowLoader, Rows

import mixle_core as mx


def rows_of(number):
    """Row r has the input r + 1."""
    return Rows(np.stack([np.arange(1, number + 1), np.ones(number, dtype=int)], 1), vocab_size=number + 2)


def loaders(number, size, **options):
    rows = rows_of(number)
    return [RowLoader(rows, data_rank=rank, data_size=size, **options) for rank in range(size)]


def real(batch):
    """Rows of a batch that are not there only to fill up."""
    used = (batch.tensors["targets"] != IGNORED).any(1)
    assert int(used.sum()) == batch.num_examples
    return batch.tensors["input_ids"][used, 0].tolist()


def an_epoch(ranks):
    """The real rows that all ranks get, batch by batch; every rank has as many batches and rows as the others."""
    per_rank = [list(loader) for loader in ranks]
    assert len({len(batches) for batches in per_rank}) == 1
    found = []
    for together in zip(*per_rank, strict=True):
        assert len({batch.tensors["input_ids"].shape for batch in together}) == 1
        found.append([row for batch in together for row in real(batch)])
    return found


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
def test_each_row_comes_exactly_once_an_epoch_whatever_divides(number, size, batch_size, at_least, seed):
    batch_size = max(batch_size, at_least)
    ranks = loaders(number, size, batch_size=batch_size, at_least=at_least, seed=seed)
    orders = []
    for _ in range(2):
        batches = an_epoch(ranks)
        assert len(batches) == len(ranks[0])
        assert all(len(batch) == batch_size * size for batch in batches[:-1])
        orders.append([row for batch in batches for row in batch])
        assert sorted(orders[-1]) == list(range(1, number + 1))
    assert all(loader.epoch == 2 for loader in ranks)


def test_a_rank_without_a_row_of_the_last_batch_gets_rows_without_a_loss():
    last = [list(loader)[-1] for loader in loaders(9, 4, batch_size=2, at_least=2)]
    assert [batch.num_examples for batch in last] == [1, 0, 0, 0]
    assert {batch.tensors["input_ids"].shape for batch in last} == {(2, 1)}


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(size, **options):
        return [sorted(batch) for batch in an_epoch(loaders(24, size, batch_size=8 // size, **options))]

    assert order(1) == order(2) == order(4)
    assert order(1, seed=1) != order(1)
    first, second = (an_epoch(ranks) for ranks in itertools.repeat(loaders(24, 2, batch_size=4), 2))
    assert first != second
    assert an_epoch(loaders(5, 1, batch_size=5, shuffle=False)) == [[1, 2, 3, 4, 5]]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 40), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60))
def test_stopping_twice_and_going_on_with_other_numbers_of_ranks_loses_and_doubles_nothing(number, before, after, batch_size, stop, again):
    """C56 and C57: two stops anywhere in two epochs, going on with another number of data ranks each time."""
    seen, state, epochs = [], None, 2
    for size, limit in ((before, stop), (after, again), (before, 10**6)):
        ranks = loaders(number, size, batch_size=batch_size, seed=3)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        streams = [itertools.chain.from_iterable(itertools.repeat(loader)) for loader in ranks]
        left = ranks[0].batches_left(epochs)
        seen.extend([row for stream in streams for row in real(next(stream))] for _ in range(min(limit, left)))
        states = [loader.state_dict() for loader in ranks]
        assert all(one == states[0] for one in states)
        state = states[0]
    assert ranks[0].batches_left(epochs) == 0
    rows = [row for batch in seen for row in batch]
    assert sorted(rows) == sorted([*range(1, number + 1)] * 2)
    assert sorted(rows[:number]) == list(range(1, number + 1)), "the first epoch is whole before the second begins"


def test_the_same_rows_remain_after_a_stop_in_a_later_epoch():
    (whole,) = loaders(20, 1, batch_size=2)
    stream = itertools.chain.from_iterable(itertools.repeat(whole))
    expected = [real(next(stream)) for _ in range(30)]
    (first,) = loaders(20, 1, batch_size=2)
    stream = itertools.chain.from_iterable(itertools.repeat(first))
    for _ in range(14):
        next(stream)
    (second,) = loaders(20, 1, batch_size=2)
    second.load_state_dict(first.state_dict())
    stream = itertools.chain.from_iterable(itertools.repeat(second))
    assert [real(next(stream)) for _ in range(16)] == expected[14:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 1}, "loader state: seed is 1, here it is 0; pass the same rows and seed"),
        ({"num_rows": 3}, "loader state: num_rows is 3, here it is 6"),
        ({"fingerprint": "x"}, "loader state: fingerprint is 'x'"),
        ({"position": 7}, "loader state: position is 7; expected a number of rows up to 6"),
        ({"position": -1}, "loader state: position is -1"),
        ({"epoch": "one"}, "loader state: epoch is 'one'"),
        ({"epoch": None}, "loader state: epoch is None"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change, said):
    (loader,) = loaders(6, 1, batch_size=2)
    state = loader.state_dict()
    with pytest.raises(mx.UsageError, match="loader state") as caught:
        loader.load_state_dict({**state, **change})
    assert said in str(caught.value)
    assert loader.state_dict() == state


def test_a_batch_has_a_row_for_each_microbatch():
    with pytest.raises(mx.UsageError, match=r"^batch_size=2 for microbatches=4: each microbatch needs a row$"):
        loaders(6, 1, batch_size=2, at_least=4)

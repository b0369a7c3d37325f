"""Counts of one update: exactly once, or an error."""

from __future__ import annotations

import pytest

from mixle_core import LedgerError
from mixle_core.ledger import Ledger

WAY_OUT = (
    "way out: run every microbatch but the last inside no_sync(), call the module that attach returned, and set "
    "ParallelPlan(unused_parameters=True) when a parameter may go unused"
)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger({"a": "alpha", "b": "alpha", "c": "beta"})


def test_once_each_is_right(ledger):
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.record("beta", {"c": 1})
    assert ledger.close((), update=0) is None


def test_none_and_twice_are_wrong_and_name_parameter_owner_and_count(ledger):
    ledger.record("alpha", {"a": 2, "b": 1})
    with pytest.raises(LedgerError) as caught:
        ledger.close((), update=7)
    assert str(caught.value) == (
        "update 7: 2 of 3 parameters were not reduced exactly once\n  a: reduced 2 times by alpha\n  c: not reduced by beta\n" + WAY_OUT
    )


def test_counts_of_one_update_add_up(ledger):
    ledger.record("beta", {"c": 1})
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.record("beta", {"c": 1})
    with pytest.raises(LedgerError, match="c: reduced 2 times by beta"):
        ledger.close((), update=0)


def test_an_unused_parameter_may_be_missing_but_not_doubled(ledger):
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.close(["c"], update=0)
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.record("beta", {"c": 1})
    ledger.close(["c"], update=1)
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.record("beta", {"c": 2})
    with pytest.raises(LedgerError, match="update 2: 1 of 3 parameters were not reduced exactly once: c: reduced 2 times by beta; way out"):
        ledger.close(["c"], update=2)


def test_every_update_starts_from_nothing(ledger):
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.record("beta", {"c": 1})
    ledger.close((), update=0)
    with pytest.raises(LedgerError, match="update 1: 3 of 3 parameters were not reduced exactly once"):
        ledger.close((), update=1)
    ledger.record("alpha", {"a": 1, "b": 1})
    ledger.record("beta", {"c": 1})
    ledger.close((), update=2)


def test_a_parameter_of_another_owner_is_refused(ledger):
    with pytest.raises(LedgerError) as caught:
        ledger.record("beta", {"a": 1})
    assert str(caught.value) == "beta reduced a, which belongs to alpha"


def test_a_parameter_of_nobody_is_refused(ledger):
    with pytest.raises(LedgerError) as caught:
        ledger.record("alpha", {"d": 1})
    assert str(caught.value) == "alpha reduced d, which belongs to nobody"

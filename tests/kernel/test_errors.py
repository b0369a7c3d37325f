"""The errors users meet, and how their texts are composed."""

from __future__ import annotations

import pytest

from mixle_core import errors
from mixle_core.errors import MixleError, explain_failure

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]


def test_these_are_the_errors():
    assert {error.__name__ for error in ALL} == {
        "MixleError",
        "PlanError",
        "CapabilityError",
        "LayoutError",
        "OwnershipError",
        "PluginError",
        "AgreementError",
        "LedgerError",
        "DeclarationError",
        "UsageError",
    }


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_caught_by_the_base_and_says_what_it_is_for(error):
    assert issubclass(error, MixleError)
    assert error.__doc__
    assert str(error("text")) == "text"


def test_errors_about_values_are_value_errors():
    assert {error.__name__ for error in ALL if issubclass(error, ValueError)} == {"PlanError", "LayoutError", "UsageError"}


def test_a_text_has_the_rule_the_items_and_the_way_out():
    assert explain_failure("2 of 3 are wrong", ["a: found 1", "b: found 2"], "set both to 3") == (
        "2 of 3 are wrong\n  a: found 1\n  b: found 2\nway out: set both to 3"
    )


def test_a_text_with_one_item_or_none_is_one_line():
    assert explain_failure("1 of 3 is wrong", iter(["a: found 1"]), "set it to 3") == "1 of 3 is wrong: a: found 1; way out: set it to 3"
    assert explain_failure("nothing there", iter(()), "add one") == "nothing there; way out: add one"


def test_long_lists_are_cut_and_counted():
    text = explain_failure("rule", (f"item {i}" for i in range(15)), "out").splitlines()
    assert text[1:-1] == [*(f"  item {i}" for i in range(12)), "  ... and 3 more"]
    assert "more" not in explain_failure("rule", (f"item {i}" for i in range(12)), "out")
    assert explain_failure("rule", ["a", "b"], "out", limit=1) == "rule\n  a\n  ... and 1 more\nway out: out"

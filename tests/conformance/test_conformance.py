"""The suite is seen to fail: over doubles that break one rule each, exactly the check of that rule fails, and for that reason."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from mixle_core.testing import NewCheckWarning, PluginConformance
from mixle_core.testing.conformance_rules import is_new, rules

from . import broken, good

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_installed_plugin(monkeypatch):
    monkeypatch.setenv("MIXLE_PLUGINS", "")


def outcomes(kind):
    """Check -> what pytest would show of it, and its words."""
    found = {}
    for name in rules(kind):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", NewCheckWarning)
                getattr(kind(), f"test_{name}")()
        except pytest.skip.Exception as skipped:
            found[name] = ("skipped", str(skipped))
        except pytest.xfail.Exception as exempted:
            found[name] = ("exempted", str(exempted))
        except NewCheckWarning as warning:
            found[name] = ("warned", str(warning))
        except AssertionError as failure:
            found[name] = ("failed", str(failure))
        else:
            found[name] = ("passed", "")
    return found


@pytest.mark.parametrize("kind", broken.SUITES, ids=lambda kind: kind.__name__)
def test_exactly_the_check_of_the_broken_rule_fails(kind):
    found = outcomes(kind)
    assert {name: text for name, (what, text) in found.items() if what == "failed"}.keys() == {kind.breaks}, found
    assert re.search(kind.says, found[kind.breaks][1], re.DOTALL), found[kind.breaks][1]
    blocked = [text for what, text in found.values() if what == "skipped" and "until it passes" in text]
    assert all(text == f"check {kind.breaks} fails, and until it passes this one says nothing" for text in blocked)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        (good.LayoutSuite, {"own_reduction", "save_state or load_state"}),
        (good.EverythingSuite, {"save_state or load_state", None}),
        (good.ExecutorSuite, {"build_model", "declare_layout", "init_params", "own_reduction", "save_state or load_state"}),
        (good.DoubleSuite, {"build_model", "declare_layout", "init_params", "save_state or load_state"}),
        (good.StateSuite, {"build_model", "declare_layout", "init_params"}),
    ],
)
def test_a_good_plugin_of_each_kind_passes_all_that_has_an_object(kind, without):
    found = outcomes(kind)
    assert {what for what, _ in found.values()} <= {"passed", "skipped"}, found
    skipped = {text for what, text in found.values() if what == "skipped"}
    reasons = {f"the plugin has no {hooks} hook" for hooks in without if hooks}
    if None in without:
        reasons.add("unused_batch() returns None: no batch leaves a parameter of make_model() out")
    assert skipped == reasons


def test_every_check_is_seen_to_fail_and_says_in_a_sentence_what_it_requires():
    known = rules(PluginConformance)
    assert {kind.breaks for kind in broken.SUITES} - {"of_today"} == set(known)
    assert all(rule.function.__doc__.endswith(".") for rule in known.values())
    assert all(set(rule.needs) <= set(known) for rule in known.values())


def test_an_exempted_check_that_fails_is_shown_with_its_reason_and_does_not_block_others():
    found = outcomes(good.RefusingSuite)
    assert found.pop("plans_reach_the_plugin") == ("exempted", "unsupported: it refuses every plan")
    assert {what for what, _ in found.values()} == {"passed", "skipped"}
    assert found["one_owner_per_parameter"][0] == "passed"
    assert found["equals_one_process"] == ("skipped", "`plans` is empty")


def test_a_new_check_only_warns_in_the_version_that_brings_it():
    what, text = outcomes(broken.OwnCheck)["of_tomorrow"]
    assert (what, text) == (
        "warned",
        "check of_tomorrow is new in mixle-core 0.2 and fails from the next minor version on: ArithmeticError: not yet",
    )
    assert not is_new("0.1", "0.1.0")
    assert is_new("0.2", "0.2.5")
    assert not is_new("0.2", "0.3.0")
    assert not is_new("0.9", "1.0.0")


def test_a_suite_without_a_plugin_and_one_inside_a_function_are_told_so():
    class Nothing(PluginConformance):
        pass

    assert "names no plugin; set plugin_name" in outcomes(Nothing)["discovered"][1]

    class Inside(good.OwnerSuite):
        pass

    assert "is defined inside a function, where other processes do not find it" in outcomes(Inside)["ranks_agree"][1]


def test_the_page_lists_every_check_with_what_it_requires():
    page = (ROOT / "docs" / "conformance.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", page.partition("## The checks")[2].partition("\n## ")[0], re.MULTILINE))
    required = {name: " ".join(rule.function.__doc__.split()) for name, rule in rules(PluginConformance).items()}
    assert listed == required


def test_the_page_builds_the_example_and_the_example_is_small():
    page = (ROOT / "docs" / "first-plugin.md").read_text()
    shown = dict(re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    shown.pop("test_wrong.py")
    example = ROOT / "docs" / "example" / "mixle-mymodel"
    files = [*example.glob("*.toml"), *example.glob("*/*.py")]
    assert {file.relative_to(example).as_posix(): file.read_text() for file in files} == shown
    assert sum(len(text.splitlines()) for text in shown.values()) < 60

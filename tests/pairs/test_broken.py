"""A broken plugin beside a good one: shown and skipped where nobody asked for it, an error that says all where somebody did."""

from __future__ import annotations

import pytest

GOOD = "torch-ddp"
DP2 = {"dp_replicate": 2}
IMPORT, CONTRACT = "failed to import", "breaks the contract of the hooks"
REPAIR, CORRECT = "repair it, or leave it out of MIXLE_PLUGINS", "correct the plugin, or leave it out of MIXLE_PLUGINS"
FAULTS = {  # plugin -> version, what went wrong, the reason, the way out
    "broken": ("0.7", IMPORT, "RuntimeError: no such device", REPAIR),
    "misspelt": ("0.8", CONTRACT, "hook 'own_reducton' does not exist; the nearest is 'own_reduction'", CORRECT),
    "defaulting": ("0.8", CONTRACT, "hook 'own_reduction' gives 'layouts' a default; take it without one", CORRECT),
}


def text_of(name):
    version, what, reason, way_out = FAULTS[name]
    return f"plugin {name} (mixle-{name} {version}) {what}: {reason}; way out: {way_out}"


@pytest.mark.parametrize("name", FAULTS)
def test_nobody_asked_for_it(environment, name):
    beside = environment(GOOD, name)
    answer = beside.ask("load")
    assert "value" in answer, answer["text"]
    assert answer["value"]["labels"] == {GOOD: f"{GOOD} (mixle-{GOOD} 0.1.0)"}
    assert answer["value"]["versions"] == [[GOOD, "0.1.0"]]
    assert list(answer["value"]["broken"]) == [name]
    assert FAULTS[name][2] in answer["value"]["broken"][name]
    assert [(log["event"], log["log_level"], log["plugin"]) for log in answer["logs"]] == [("plugin_broken", "warning", name)]
    alone = environment(GOOD).ask("explain", plan=DP2)["value"]
    assert beside.ask("explain", plan=DP2)["value"] == alone


@pytest.mark.parametrize("asked", [{"plugins": True}, {"allow": True}], ids=["in-code", "allow-list"])
@pytest.mark.parametrize("name", FAULTS)
def test_somebody_asked_for_it(environment, name, asked):
    names = [GOOD, name]
    question = {"plugins": names} if "plugins" in asked else {"allow": ",".join(names)}
    answer = environment(GOOD, name).ask("explain", plan=DP2, **question)
    assert (answer.get("error"), answer.get("text")) == ("PluginError", text_of(name))


@pytest.mark.parametrize("name", FAULTS)
def test_it_can_be_left_out(environment, name):
    beside = environment(GOOD, name)
    for question in ({"plugins": [GOOD]}, {"allow": GOOD}):
        answer = beside.ask("explain", plan=DP2, **question)
        assert answer["value"]["owners"] == [GOOD]
        assert answer["logs"] == []


def test_the_command_works_with_the_good_one_and_warns_of_the_broken_one(environment):
    done = environment(GOOD, "qwen3", "broken").mixle("explain", "--model", "qwen3:tiny", "--dp-replicate", "2")
    assert done.returncode == 0, done.stderr
    assert "Ownership of 25 trainable parameters, plan dp_replicate=2" in done.stdout
    (warning,) = done.stderr.strip().splitlines()
    for word in ("plugin_broken", "broken", "RuntimeError: no such device"):
        assert word in warning


@pytest.fixture(scope="module")
def checked(environment):
    """What `mixle plugins --check` says of all of them."""
    place = environment(GOOD, *FAULTS, "faulty")
    assert place.states() == dict.fromkeys(sorted([GOOD, *FAULTS, "faulty"]), "enabled")  # listing imports none
    return place.states("--check", code=1)


def test_check_imports_the_good_one(checked):
    assert checked[GOOD] == "enabled, imports"


@pytest.mark.parametrize("name", FAULTS)
def test_check_says_what_is_broken(checked, name):
    assert checked[name].startswith("broken: ")
    assert checked[name].endswith(text_of(name))


def test_check_says_what_is_broken_where_several_things_are(checked):
    assert checked["faulty"].startswith("broken: ")
    for fault in ("hook 'own_axs' does not exist; the nearest is 'own_axis'", "hook 'own_reduction' takes 'world'"):
        assert fault in checked["faulty"]


NONSENSE = {  # plugin -> where it is found, and the words for it
    "nonsense-claim": ("explain", DP2, "own_reduction returned str, expected Claim, Refusal or None"),
    "nonsense-axis": ("explain", {"tp": 2}, "own_axis returned list, expected AxisClaim, Refusal or None"),
    "nonsense-layout": ("explain", DP2, "declare_layout returned dict, expected ModelLayout or None"),
    "nonsense-fill": ("attach", {}, "init_params returned list, expected a set of names or None"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_an_answer_of_a_wrong_type_is_an_error_that_names_the_plugin_and_the_way_out(environment, name):
    """Asked for or not: an answer that cannot be read may have been a claim."""
    kind, plan, words = NONSENSE[name]
    beside = environment(GOOD, "dtensor-tp", "qwen3", *NONSENSE)
    answer = beside.ask(kind, plan=plan, allow=f"{GOOD},dtensor-tp,qwen3,{name}")
    assert answer.get("error") == "PluginError", answer
    assert f"{name} (mixle-{name} 0.9): {words}" in answer["text"]
    assert "; way out: " in answer["text"]
    assert "value" in beside.ask(kind, plan=plan, allow=f"{GOOD},dtensor-tp,qwen3")


def test_an_answer_of_a_wrong_type_is_no_less_an_error_where_nobody_asked_for_the_plugin(environment):
    answer = environment(GOOD, "nonsense-claim").ask("explain", plan=DP2)
    assert answer.get("error") == "PluginError", answer
    assert "nonsense-claim (mixle-nonsense-claim 0.9): own_reduction returned str" in answer["text"]

"""Two distributions with one entry name, one module under two names, one distribution in two places."""

from __future__ import annotations

import itertools

import pytest

from .environments import CORE

OURS, THEIRS = "mixle-torch-ddp 0.1.0", "impostor 7.0"
DP2 = {"dp_replicate": 2}


def doubled(first, second):
    return f"two distributions register the plugin 'torch-ddp': {first} and {second}; way out: uninstall one of them"


@pytest.mark.parametrize(
    "question", [{}, {"plugins": ["torch-ddp"]}, {"plugins": ["qwen3"]}, {"allow": "qwen3"}], ids=["all", "asked", "other", "left-out"]
)
def test_two_distributions_with_one_name_are_an_error_that_names_both(environment, question):
    answer = environment("torch-ddp", "impostor", "qwen3").ask("explain", plan=DP2, **question)
    assert answer.get("error") == "PluginError"
    assert answer["text"] in {doubled(OURS, THEIRS), doubled(THEIRS, OURS)}


def test_whichever_comes_first_on_the_path(fresh, tmp_path):
    environment = fresh().install(CORE)
    places = {OURS: tmp_path / "ours", THEIRS: tmp_path / "theirs"}
    for label, place in places.items():
        environment.install(label.split()[0], target=place)
    for first, second in itertools.permutations(places):
        done = environment.mixle("plugins", PYTHONPATH=f"{places[first]}:{places[second]}")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"mixle: {doubled(first, second)}\n"


def test_uninstalling_one_of_them_is_the_way_out(fresh):
    environment = fresh().install(CORE, "mixle-torch-ddp", "impostor")
    assert environment.ask("explain", plan=DP2).get("error") == "PluginError"
    environment.uninstall("impostor")
    assert environment.ask("explain", plan=DP2)["value"]["owners"] == ["torch-ddp"]


def test_one_module_under_two_names_is_an_error_that_names_both(environment):
    twice = environment("torch-ddp", "alias")
    answer = twice.ask("explain", plan=DP2)
    assert answer.get("error") == "PluginError", answer
    for label in ("ddp-alias (mixle-alias 1.0)", "torch-ddp (mixle-torch-ddp 0.1.0)", "way out: "):
        assert label in answer["text"]
    for name in ("ddp-alias", "torch-ddp"):
        assert twice.ask("explain", plan=DP2, allow=name)["value"]["owners"] == [name]


def test_one_distribution_in_two_places_is_the_one_that_is_imported(fresh, tmp_path):
    environment = fresh().install(CORE)
    places = {"1.0": tmp_path / "old", "1.1": tmp_path / "new"}
    for version, place in places.items():
        environment.install(f"mixle-ahead=={version}", target=place)
    code = "import mixle_core as mx; print(*mx.load_plugins().versions); import mixle_ahead; print(mixle_ahead.__file__)"
    for first, second in itertools.permutations(places):
        path = {"PYTHONPATH": f"{places[first]}:{places[second]}"}
        said = environment.run(environment.python, "-c", code, env=path).stdout.splitlines()
        assert said == [f"('ahead', '{first}')", str(places[first] / "mixle_ahead.py")]


def test_two_distributions_with_one_command_are_an_error_that_names_both_and_stops_no_other_command(environment):
    both = environment("lm", "trainer", "torch-ddp")
    done = both.mixle("train", "--model", "qwen3:tiny")
    assert (done.returncode, done.stdout) == (2, "")
    ours, theirs = "mixle-lm 0.1.0", "mixle-trainer 1.0"
    start, end = "mixle: two distributions add the command 'train': ", "; way out: uninstall one of them\n"
    assert done.stderr in {f"{start}{ours} and {theirs}{end}", f"{start}{theirs} and {ours}{end}"}
    assert both.states() == {"torch-ddp": "enabled"}
    listed = both.mixle("--help")
    assert listed.returncode == 0 and "two distributions add the command 'train'" in " ".join(listed.stdout.split()), listed

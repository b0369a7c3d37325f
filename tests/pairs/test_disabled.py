"""Plugins that are installed and left out, named and not there, or uninstalled between two runs."""

from __future__ import annotations

import pytest

from .environments import CORE, NATIVE

LEFT_OUT = "left out by MIXLE_PLUGINS"
DP2, FSDP = {"dp_replicate": 2}, {"dp_shard": 2}
NONE_OF_IT = "way out: install or enable a plugin that owns these axes, or change the plan as the refusals say"


@pytest.fixture(scope="module")
def natives(environment):
    return environment(*NATIVE)


def refused(answer, kind):
    assert (answer.get("error"), answer.get("value")) == (kind, None), answer
    return answer["text"]


def test_an_allow_list_of_one_leaves_the_others_out(natives):
    assert natives.states(MIXLE_PLUGINS="torch-ddp") == {name: "enabled" if name == "torch-ddp" else LEFT_OUT for name in NATIVE}
    loaded = natives.ask("load", allow="torch-ddp")["value"]
    assert loaded == {"labels": {"torch-ddp": "torch-ddp (mixle-torch-ddp 0.1.0)"}, "versions": [["torch-ddp", "0.1.0"]], "broken": {}}
    assert natives.ask("explain", plan=DP2, allow="torch-ddp")["value"]["owners"] == ["torch-ddp"]
    lines = refused(natives.ask("explain", plan=FSDP, allow="torch-ddp"), "OwnershipError").splitlines()
    assert lines[:3] == [
        "each trainable parameter needs exactly one owner; none for 25 of 25",
        "  torch-ddp (mixle-torch-ddp 0.1.0) declined: dp_shard=2 shards parameters; set dp_shard=1, or install and enable torch-fsdp2",
        "  lm_head.weight",
    ]
    assert lines[-1] == NONE_OF_IT


def test_an_empty_allow_list_leaves_all_out(natives):
    assert natives.ask("load", allow="")["value"] == {"labels": {}, "versions": [], "broken": {}}
    lines = refused(natives.ask("explain", plan=DP2, allow=""), "OwnershipError").splitlines()
    assert (lines[1], lines[-1]) == ("  lm_head.weight", NONE_OF_IT)
    assert natives.ask("explain", allow="")["value"]["owners"] == ["local"]
    refused(natives.ask("explain", plan={"tp": 2}, allow=""), "CapabilityError")


def test_the_table_for_people_shows_who_is_left_out(natives):
    done = natives.mixle("plugins", MIXLE_PLUGINS="")
    assert done.returncode == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert rows == [[name, f"mixle-{name}", "0.1.0", LEFT_OUT] for name in NATIVE]


def test_check_imports_only_what_is_enabled(environment):
    beside = environment("torch-ddp", "broken")
    assert beside.states("--check", MIXLE_PLUGINS="torch-ddp") == {"broken": LEFT_OUT, "torch-ddp": "enabled, imports"}


@pytest.mark.parametrize(("name", "hint"), [("torch-dpp", " (did you mean 'torch-ddp'?)"), ("gpt9", "")], ids=["misspelt", "unknown"])
def test_a_name_in_the_allow_list_that_is_not_installed_is_an_error(natives, name, hint):
    assert refused(natives.ask("explain", plan=DP2, allow=f"torch-ddp,{name}"), "PluginError") == (
        f"no plugin named '{name}' is installed{hint}; way out: pip install mixle-{name}, or `mixle plugins` lists what is there"
    )


def test_the_command_tells_of_a_name_in_the_allow_list_that_is_not_installed(natives):
    """The plugins that are there are not to blame for it."""
    done = natives.mixle("plugins", "--check", "--json", MIXLE_PLUGINS="torch-ddp,gpt9")
    assert done.returncode != 0
    assert "gpt9" in done.stdout + done.stderr
    assert "broken" not in done.stdout


@pytest.mark.parametrize("names", [["torch-fsdp2"], ["torch-ddp", "torch-fsdp2"]], ids=" ".join)
def test_a_plugin_that_is_left_out_cannot_be_asked_for_in_code(natives, names):
    assert refused(natives.ask("explain", plan=FSDP, plugins=names, allow="torch-ddp"), "PluginError") == (
        "plugin 'torch-fsdp2' is asked for but MIXLE_PLUGINS leaves it out; way out: add it to MIXLE_PLUGINS"
    )


def test_a_list_in_code_narrows_what_is_enabled(natives):
    both = natives.ask("explain", plan=DP2)["value"]
    assert natives.ask("explain", plan=DP2, plugins=["torch-ddp"])["value"] == both
    refused(natives.ask("explain", plan=DP2, plugins=["torch-fsdp2"]), "OwnershipError")
    refused(natives.ask("explain", plan=DP2, plugins=[]), "OwnershipError")


def test_the_command_cannot_build_the_model_of_a_plugin_that_is_left_out(natives):
    done = natives.mixle("explain", "--model", "qwen3:tiny", MIXLE_PLUGINS="torch-ddp")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "mixle: plugin 'qwen3' is asked for but MIXLE_PLUGINS leaves it out; way out: add it to MIXLE_PLUGINS\n",
    )


def test_a_plugin_that_is_uninstalled_owns_nothing_and_comes_back_as_it_was(fresh):
    environment = fresh().install(CORE, "mixle-ahead==1.0", "mixle-torch-ddp")
    preferred = {"plan": DP2, "backend": ["ahead", "torch_native"]}
    before = environment.ask("explain", **preferred)["value"]
    assert before["owners"] == ["ahead"]
    environment.uninstall("mixle-ahead")
    assert environment.states() == {"torch-ddp": "enabled"}
    without = environment.ask("explain", **preferred)["value"]
    assert (without["owners"], without["digest"] != before["digest"]) == (["torch-ddp"], True)
    environment.uninstall("mixle-torch-ddp")
    assert refused(environment.ask("explain", **preferred), "CapabilityError") == (
        "backend ahead or torch_native: no plugin of it owns dp_replicate=2; way out: install a plugin of this backend, or change the plan"
    )
    done = environment.mixle("plugins")
    assert (done.returncode, done.stdout) == (
        0,
        "no plugin is installed; install the backends and layouts you use: pip install mixle-NAME\n",
    )
    environment.install("mixle-torch-ddp", "mixle-ahead==1.0")
    assert environment.ask("explain", **preferred)["value"] == before

"""Two ranks that have other plugins installed or enabled: both fail, within seconds, with the rank and the plugin."""

from __future__ import annotations

import pytest

from .environments import NATIVE

DP2, FSDP = {"dp_replicate": 2, "timeout_s": 60.0}, {"dp_shard": 2, "timeout_s": 60.0}
PREPARED = "ranks prepared different things: rank 1 differs from rank 0 at "
ALIKE = "; make them alike before training"


def failed(answers):
    """(error, text) of every rank, after checking that none of them waited."""
    for answer in answers:
        assert "value" not in answer, answer
        assert answer["seconds"] < 20.0
    return [(answer["error"], answer["text"]) for answer in answers]


@pytest.fixture
def unlike(environment, ranks):
    """Rank 0 with all native plugins and a rival; rank 1 without torch-fsdp2 and with a newer rival."""
    lacking = [name for name in NATIVE if name != "torch-fsdp2"]
    return ranks(environment(*NATIVE, "ahead==1.0"), environment(*lacking, "ahead==1.1"))


def test_a_plugin_that_one_rank_lacks(unlike):
    """It would own nothing under this plan, and the ranks still are not alike."""
    enabled = {"allow": "qwen3,torch-ddp,torch-fsdp2"}, {"allow": "qwen3,torch-ddp"}
    (kind, text), other = failed(unlike("attach", *enabled, plan=DP2))
    assert (kind, text) == other
    assert kind == "AgreementError"
    assert text.startswith(PREPARED)
    assert text.endswith(ALIKE)
    assert "plugins" in text
    assert "torch-fsdp2" in text


def test_the_owner_that_one_rank_lacks(unlike):
    (kind, text), (own_kind, own_text) = failed(unlike("attach", plan=FSDP, backend="torch_native"))
    assert own_kind == "CapabilityError"
    assert own_text.startswith("backend torch_native: no plugin of it owns dp_shard=2")
    assert "torch-ddp (mixle-torch-ddp 0.1.0) declined: dp_shard=2 shards parameters" in own_text
    assert (kind, text) == ("AgreementError", f"rank 1 could not prepare: {own_text}")


def test_another_version_of_a_plugin(unlike):
    question = {"allow": "ahead,torch-ddp", "backend": "torch_native"}
    (kind, text), other = failed(unlike("attach", plan=DP2, **question))
    assert (kind, text) == other
    assert kind == "AgreementError"
    assert text.startswith(PREPARED)
    assert '"1.1" against "1.0"' in text
    assert "ahead" in text, "a version without the plugin it belongs to"


def test_an_allow_list_on_one_rank(unlike):
    (kind, text), other = failed(unlike("attach", {"allow": "dtensor-tp,torch-ddp"}, {"allow": "torch-ddp"}, plan=DP2))
    assert (kind, text) == other
    assert kind == "AgreementError"
    assert text.startswith(PREPARED)
    assert "dtensor-tp" in text


def test_an_allow_list_on_one_rank_that_names_what_is_not_installed_there(unlike):
    (kind, text), (own_kind, own_text) = failed(unlike("attach", plan=FSDP, allow="torch-fsdp2"))
    assert own_kind == "PluginError"
    assert own_text == (
        "no plugin named 'torch-fsdp2' is installed (did you mean 'torch-ddp'?); "
        "way out: pip install mixle-torch-fsdp2, or `mixle plugins` lists what is there"
    )
    assert (kind, text) == ("AgreementError", f"rank 1 could not prepare: {own_text}")


def test_what_both_have_and_enable_is_enough(unlike):
    """Also after they failed to agree."""
    failed(unlike("attach", plan=DP2, backend="torch_native"))
    for question in ({"allow": "torch-ddp,qwen3"}, {"plugins": ["torch-ddp", "qwen3"]}):
        assert [answer["value"]["owners"] for answer in unlike("attach", plan=DP2, **question)] == [["torch-ddp"]] * 2
    assert {report["value"]["passed"] for report in unlike("verify", plan=DP2, allow="torch-ddp")} == {True}


def test_a_broken_plugin_on_one_rank(environment, ranks):
    """Nobody asked for it and it is not loaded: the ranks are alike. Asked for, it is an error everywhere."""
    ask = ranks(environment("torch-ddp"), environment("torch-ddp", "broken"))
    answers = ask("attach", plan=DP2)
    assert [answer["value"]["owners"] for answer in answers] == [["torch-ddp"]] * 2
    assert [[log["plugin"] for log in answer["logs"]] for answer in answers] == [[], ["broken"]]
    (kind, text), (own_kind, own_text) = failed(ask("attach", {"allow": "torch-ddp"}, {"allow": "torch-ddp,broken"}, plan=DP2))
    assert (own_kind, own_text.startswith("plugin broken (mixle-broken 0.7) failed to import: ")) == ("PluginError", True)
    assert (kind, text) == ("AgreementError", f"rank 1 could not prepare: {own_text}")


def test_a_doubled_plugin_on_one_rank(environment, ranks):
    ask = ranks(environment("torch-ddp"), environment("torch-ddp", "impostor", "qwen3"))
    (kind, text), (own_kind, own_text) = failed(ask("attach", plan=DP2))
    assert (own_kind, own_text.startswith("two distributions register the plugin 'torch-ddp': ")) == ("PluginError", True)
    assert (kind, text) == ("AgreementError", f"rank 1 could not prepare: {own_text}")

"""Plans that train on real ranks from the installed wheels, beside one process."""

from __future__ import annotations

import json

import pytest

from .environments import NATIVE

TP_OWNERS = {"dtensor-tp", "local"}
CELLS = {
    "dp2-ddp-beside-fsdp2": (("torch-ddp", "torch-fsdp2"), {"dp_replicate": 2}, {}, {"torch-ddp"}),
    "fsdp2-beside-ddp": (("torch-ddp", "torch-fsdp2"), {"dp_shard": 2}, {}, {"torch-fsdp2"}),
    "dp2-beside-all": (NATIVE, {"dp_replicate": 2}, {}, {"torch-ddp"}),
    "fsdp2-beside-all": (NATIVE, {"dp_shard": 2}, {}, {"torch-fsdp2"}),
    "hsdp2x2-beside-all": (NATIVE, {"dp_replicate": 2, "dp_shard": 2}, {}, {"torch-fsdp2"}),
    "tp2-beside-all": (NATIVE, {"tp": 2}, {}, TP_OWNERS),
    "tp2-sp-beside-all": (NATIVE, {"tp": 2, "sequence_parallel": True}, {}, TP_OWNERS),
    "dp2xtp2-beside-all": (NATIVE, {"dp_replicate": 2, "tp": 2}, {}, {"torch-ddp"}),
    "fsdp2xtp2-beside-all": (NATIVE, {"dp_shard": 2, "tp": 2}, {}, {"torch-fsdp2"}),
    "rival-preferred": (("torch-ddp", "ahead==1.0"), {"dp_replicate": 2}, {"backend": ["ahead", "torch_native"]}, {"ahead"}),
    "native-preferred": (("torch-ddp", "ahead==1.0"), {"dp_replicate": 2}, {"backend": ["torch_native", "ahead"]}, {"torch-ddp"}),
    "rival-left-out": (("torch-ddp", "ahead==1.0"), {"dp_replicate": 2}, {"allow": "torch-ddp"}, {"torch-ddp"}),
    "broken-beside": (("torch-ddp", "broken"), {"dp_replicate": 2}, {}, {"torch-ddp"}),
}


@pytest.mark.parametrize("cell", CELLS)
def test_it_trains_as_one_process_does_and_only_the_owner_reduces(environment, ranks, cell):
    installed, axes, question, owners = CELLS[cell]
    number = 1
    for axis in ("dp_replicate", "dp_shard", "tp"):
        number *= axes.get(axis, 1)
    ask = ranks(*[environment(*installed)] * number)
    plan = {**axes, "gradient_accumulation_steps": 2, "timeout_s": 60.0}
    reports = [answer.get("value") or pytest.fail(answer["text"]) for answer in ask("verify", plan=plan, **question)]
    for report in reports:
        assert (report["passed"], report["updates"]) == (True, 3)
        assert report["gradient_error"] <= 1e-5
        assert report["parameter_error"] <= 1e-5
        assert set(report["collectives"]) == owners
        assert all(count > 0 for owner, count in report["collectives"].items() if owner != "local")
    assert reports[1:] == reports[:1] * (number - 1)
    ask("leave")


@pytest.mark.parametrize(
    ("installed", "plan", "owners"),
    [(("qwen3", "torch-ddp", "torch-fsdp2"), ["--dp-replicate", "2"], {"torch-ddp"}), (NATIVE, ["--tp", "2"], TP_OWNERS)],
    ids=["dp2", "tp2"],
)
def test_the_installed_command_verifies_a_plan_on_ranks_it_starts(environment, installed, plan, owners):
    done = environment(*installed).mixle("verify", "--model", "qwen3:tiny", *plan, "--accumulation", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["passed"], report["tolerance"], set(report["collectives"])) == (True, 1e-5, owners)
    for update in report["updates"]:
        assert update["gradient_error"] <= 1e-5
        assert update["parameter_error"] <= 1e-5
        assert update["copies_equal"] is True

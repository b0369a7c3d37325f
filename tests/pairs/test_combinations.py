"""Every combination of the native owners and layouts, installed from wheels, with every plan: who owns what, or what is missing."""

from __future__ import annotations

import itertools

import pytest

from .environments import NATIVE

SUBSETS = [subset for size in range(len(NATIVE) + 1) for subset in itertools.combinations(NATIVE, size)]
PLANS = {
    "one-process": {},
    "dp2": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "dp2xtp2": {"dp_replicate": 2, "tp": 2},
    "fsdp2xtp2": {"dp_shard": 2, "tp": 2},
}
SHARDED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PARAMETERS = {  # name -> what tp makes of it: a slice, a replica that sees some heads, a replica that sees some tokens
    "lm_head.weight": "slice",
    "model.embed_tokens.weight": "slice",
    "model.norm.weight": "tokens",
    **{f"model.layers.{i}.self_attn.{name}.weight": "slice" for i in range(2) for name in SHARDED[:4]},
    **{f"model.layers.{i}.mlp.{name}.weight": "slice" for i in range(2) for name in SHARDED[4:]},
    **{f"model.layers.{i}.self_attn.{name}_norm.weight": "heads" for i in range(2) for name in "qk"},
    **{f"model.layers.{i}.{name}_layernorm.weight": "tokens" for i in range(2) for name in ("input", "post_attention")},
}
LABELS = {name: f"{name} (mixle-{name} 0.1.0)" for name in NATIVE}
COLUMNS = ["dp_replicate", "dp_shard", "tp"]


def owner_needed(plan: dict) -> str:
    """Who claims: the rule of the design, in order."""
    if plan.get("dp_shard", 1) > 1:
        return "torch-fsdp2"
    if plan.get("dp_replicate", 1) > 1:
        return "torch-ddp"
    return "dtensor-tp" if plan.get("tp", 1) > 1 else "local"


def expected_rows(plan: dict) -> dict[str, list]:
    """Name -> owner, backend, operation and the axes that are summed over."""
    rows = {}
    data = [axis for axis in ("dp_replicate", "dp_shard") if plan.get(axis, 1) > 1]
    for name, kind in PARAMETERS.items():
        tp = plan.get("tp", 1) > 1
        pending = bool(data) or (tp and kind != "slice")
        summed = data + (["tp"] if tp and (kind == "heads" or (kind == "tokens" and plan.get("sequence_parallel"))) else [])
        owner = owner_needed(plan) if pending else "local"
        rows[name] = [owner, "local" if owner == "local" else "torch_native", "sum" if summed else "none", summed]
    return rows


def refusals(installed: tuple[str, ...], plan: dict) -> list[str]:
    """What the installed owners say who cannot serve a plan whose owner is not installed."""
    shard, replicate = plan.get("dp_shard", 1), plan.get("dp_replicate", 1)
    said = {}
    if plan.get("tp", 1) > 1:
        said["dtensor-tp"] = (
            "another axis than tp is pending, and its owner sums over tp too; "
            "install and enable torch-ddp (dp_replicate) or torch-fsdp2 (dp_shard)"
        )
    if shard > 1:
        said["torch-ddp"] = f"dp_shard={shard} shards parameters; set dp_shard=1, or install and enable torch-fsdp2"
    elif replicate > 1:
        said["torch-fsdp2"] = "dp_shard=1 leaves nothing to shard; set dp_shard above 1"
    return [f"{LABELS[name]} declined: {said[name]}" for name in sorted(said) if name in installed]


def axes_text(plan: dict) -> str:
    return " x ".join(f"{axis}={plan[axis]}" for axis in COLUMNS if axis in plan)


def expected_error(installed: tuple[str, ...], plan: dict) -> tuple[str, list[str]] | None:
    """Class of the error, and the lines it begins and ends with."""
    if plan.get("tp", 1) > 1 and "dtensor-tp" not in installed:
        rule = f"each axis that splits the forward needs exactly one executor (plan: {axes_text(plan)}); none for 1 of 1: tp"
        return "CapabilityError", [f"{rule}; way out: set the axis to 1, or install and enable a plugin that executes it"]
    if plan.get("tp", 1) > 1 and "qwen3" not in installed:
        return "LayoutError", [
            "25 of 25 parameters are undeclared on axis 'tp' of size 2",
            '  "lm_head": ModuleLayout(parameters={"weight": Replica("complete")}),  # or Replica("partial"), or Shard(dim)',
            'way out: put these lines into a ModelLayout(axis="tp", modules={...}) with the right roles, or install the layout plugin',
        ]
    if owner_needed(plan) not in ("local", *installed):
        return "OwnershipError", [
            "each trainable parameter needs exactly one owner; none for 25 of 25",
            *(f"  {line}" for line in refusals(installed, plan)),
            "  lm_head.weight",
            "way out: install or enable a plugin that owns these axes, or change the plan as the refusals say",
        ]
    return None


@pytest.fixture(scope="module")
def digests() -> dict[str, str]:
    """Plan -> digest of its table in the first combination that has one."""
    return {}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("installed", SUBSETS, ids=lambda subset: "+".join(subset) or "no-plugin")
def test_a_plan_has_the_owner_that_claims_it_or_the_error_that_says_what_is_missing(environment, digests, installed, plan):
    answer = environment(*installed).ask("explain", plan=PLANS[plan])
    assert answer["logs"] == []
    error = expected_error(installed, PLANS[plan])
    if error is None:
        found = answer["value"]
        assert found["rows"] == expected_rows(PLANS[plan])
        assert found["executors"] == ({"tp": "dtensor-tp"} if "tp" in PLANS[plan] else {})
        # a plugin that is installed beside those that are needed changes nothing
        assert found["digest"] == digests.setdefault(plan, found["digest"])
    else:
        kind, lines = error
        assert (answer.get("error"), answer.get("value")) == (kind, None), answer
        said = answer["text"].splitlines()
        assert said[: len(lines) - 1] + said[-1:] == lines


def test_the_rule_of_this_test_leaves_every_outcome_to_be_seen():
    outcomes = [(expected_error(subset, plan) or ("table",))[0] for subset in SUBSETS for plan in PLANS.values()]
    assert {outcome: outcomes.count(outcome) for outcome in set(outcomes)} == {
        "table": 16 + 8 + 8 + 8 + 4 + 4 + 2 + 2,
        "OwnershipError": 8 + 8 + 8 + 2 + 2,
        "LayoutError": 4 * 4,
        "CapabilityError": 8 * 4,
    }
    assert len(PARAMETERS) == 25


def test_a_python_of_the_environment_says_what_its_fork_says(environment):
    """The forks that answer these tests see what the environment's own interpreter sees."""
    everything = environment(*NATIVE)
    code = f"""
import torch, transformers
import mixle_core as mx
sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
for plan in {list(PLANS.values())!r}:
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=16))
    print(mx.explain(model, mx.ParallelPlan(**plan)).digest)
"""
    theirs = everything.run(everything.python, "-I", "-c", code).stdout.split()
    assert theirs == [everything.ask("explain", plan=plan)["value"]["digest"] for plan in PLANS.values()]

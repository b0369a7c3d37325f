"""What ranks must share, and the line that says where they do not."""

from __future__ import annotations

import hashlib
import json
import pickle
from typing import Any

import attrs
import pytest

from mixle_core import Claim, ModelLayout, ParallelPlan, Replica, Shard
from mixle_core.ownership import arbitrate, canonical_json
from mixle_core.runtime.agreement import agreement_document, digest, first_difference
from tests.kernel.fakes import Model, Parameter, declare, roles

PLAN = ParallelPlan(dp_replicate=2, tp=2)


def parameters() -> dict[str, Parameter]:
    return {"a.weight": Parameter(4, 4), "b.weight": Parameter(4, 4), "c.weight": Parameter(4, 4)}


def document(
    held: dict[str, Parameter] | None = None,
    *,
    plan: ParallelPlan = PLAN,
    plugins: tuple[tuple[str, str], ...] = (("alpha", "1.0"), ("beta", "1.0")),
    layout: ModelLayout | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The document of a rank that holds these parameters."""
    model = Model(parameters() if held is None else held)
    every = ModelLayout(axis="tp", modules={"*": roles(x=Replica()).modules["x"]}, units=["*"])
    layouts = declare(model, plan, layout or every)
    claim = Claim(owner=int, parameters=layouts.trainable, axes=["dp_replicate", "tp"], backend="x")
    table, _ = arbitrate(plan, layouts, [("alpha", claim)], [])
    return agreement_document(plan, plugins, layouts, table, {"seed": 0, **extra})


def difference(*documents: dict[str, Any]) -> str:
    """The line for documents that travelled between ranks."""
    return first_difference([pickle.loads(pickle.dumps(each)) for each in documents])


def test_equal_ranks_have_one_digest_and_others_have_another():
    assert digest(document()) == digest(document())
    assert digest(document()) == hashlib.sha256(canonical_json(document()).encode()).hexdigest()
    changed = [
        document(plan=attrs.evolve(PLAN, microbatches=2)),
        document(plugins=(("alpha", "1.1"), ("beta", "1.0"))),
        document(seed=1),
        document(dict(reversed(parameters().items()))),
        document({**parameters(), "b.weight": Parameter(4, 4, requires_grad=False)}),
        document(layout=ModelLayout(axis="tp", modules={"*": roles(x=Replica("partial")).modules["x"]}, units=["*"])),
        document(layout=ModelLayout(axis="tp", modules={"*": roles(x=Replica()).modules["x"]})),
    ]
    assert len({digest(document()), *map(digest, changed)}) == 1 + len(changed)


def test_a_document_is_json_with_the_facts_of_every_parameter():
    tied = Parameter(4, 2, dtype="torch.bfloat16")
    held = {"wte.weight": tied, "head.weight": tied, "frozen.weight": Parameter(3, requires_grad=False)}
    found = json.loads(json.dumps(document(held, layout=roles(wte=Shard(0), frozen=Replica()))))
    assert found["parameters"] == [
        {
            "name": "frozen.weight",
            "shape": [3],
            "dtype": "torch.float32",
            "trainable": False,
            "aliases": [],
            "roles": {"tp": "Replica(complete)"},
        },
        {
            "name": "wte.weight",
            "shape": [4, 2],
            "dtype": "torch.bfloat16",
            "trainable": True,
            "aliases": ["head.weight"],
            "roles": {"tp": "Shard(0)"},
        },
    ]
    assert [row["name"] for row in found["table"]] == ["wte.weight"]
    assert found["sequence"] == ["wte.weight", "head.weight", "frozen.weight"]
    assert found["plugins"] == {"alpha": "1.0", "beta": "1.0"}
    assert found["plan"] == PLAN.as_dict()
    assert found["extra"] == {"seed": 0}


def test_the_odd_rank_of_two_is_the_second():
    assert difference(document(), document(seed=1)) == "rank 1 differs from rank 0 at extra.seed: 1 against 0"


@pytest.mark.parametrize("odd", range(4))
def test_the_odd_rank_of_four_is_named_wherever_it_is(odd):
    documents = [document(seed=7 if rank == odd else 3) for rank in range(4)]
    assert difference(*documents) == f"rank {odd} differs from rank {1 if odd == 0 else 0} at extra.seed: 7 against 3"


def test_the_first_of_several_odd_ranks_is_named():
    documents = [document(seed=seed) for seed in (0, 5, 0, 6, 0)]
    assert difference(*documents) == "rank 1 differs from rank 0 at extra.seed: 5 against 0"


def test_another_plan_is_named_by_field():
    other = document(plan=attrs.evolve(PLAN, gradient_accumulation_steps=4))
    assert difference(document(), other) == "rank 1 differs from rank 0 at plan.gradient_accumulation_steps: 4 against 1"


def test_equal_numbers_of_another_type_are_found():
    other = document(plan=attrs.evolve(PLAN, timeout_s=600))
    assert difference(document(), other) == "rank 1 differs from rank 0 at plan.timeout_s: 600 against 600.0"
    assert difference({"x": [1, 2]}, {"x": [1, True]}) == "rank 1 differs from rank 0 at x[1]: true against 2"
    assert difference({"x": [1, 1]}, {"x": [1, True]}) == "rank 1 differs from rank 0 at x[1]: true against 1"


def test_another_version_of_a_plugin_is_found():
    other = document(plugins=(("alpha", "1.0"), ("beta", "2.0")))
    assert difference(document(), other) == 'rank 1 differs from rank 0 at plugins.beta: "2.0" against "1.0"'


def test_a_missing_plugin_is_found():
    other = document(plugins=(("alpha", "1.0"),))
    assert difference(document(), other) == 'rank 1 differs from rank 0 at plugins.beta: "absent" against "1.0"'
    assert difference(other, document()) == 'rank 1 differs from rank 0 at plugins.beta: "1.0" against "absent"'


def test_parameters_registered_in_another_order_are_found():
    other = document(dict(reversed(parameters().items())))
    assert difference(document(), document(), other) == ('rank 2 differs from rank 0 at sequence[0]: "c.weight" against "a.weight"')


def test_a_frozen_parameter_is_found_by_name():
    other = document({**parameters(), "b.weight": Parameter(4, 4, requires_grad=False)})
    assert difference(document(), other) == "rank 1 differs from rank 0 at parameters[b.weight].trainable: false against true"


def test_another_shape_is_found_by_name():
    other = document({**parameters(), "b.weight": Parameter(4, 8)})
    assert difference(document(), other) == "rank 1 differs from rank 0 at parameters[b.weight].shape[1]: 8 against 4"


def test_a_missing_parameter_is_found_by_name_also_when_its_neighbour_looks_different():
    all_of_them = {**parameters(), "c.weight": Parameter(9, dtype="torch.float64")}
    fewer = {name: parameter for name, parameter in all_of_them.items() if name != "b.weight"}
    assert difference(document(all_of_them), document(fewer)) == (
        'rank 1 differs from rank 0 at parameters[1].name: "c.weight" against "b.weight"'
    )


def test_a_missing_last_parameter_is_found_by_name():
    fewer = {name: parameter for name, parameter in parameters().items() if name != "c.weight"}
    assert difference(document(), document(fewer)) == (
        "rank 1 differs from rank 0 at parameters[c.weight]: 2 entries (absent there) against 3 entries"
    )


def test_a_value_that_only_one_rank_has_is_found():
    assert difference(document(), document(device="cpu")) == 'rank 1 differs from rank 0 at extra.device: "cpu" against "absent"'
    assert difference(document(device="cpu"), document()) == 'rank 1 differs from rank 0 at extra.device: "absent" against "cpu"'


def test_long_values_are_cut():
    assert difference({"x": "a" * 100}, {"x": ""}) == f'rank 1 differs from rank 0 at x: "" against "{"a" * 76}...'


def test_another_owner_is_found_by_parameter():
    left, right = ({"table": [{"name": "a", "owner": owner, "pending": ("tp",)}]} for owner in ("alpha", "beta"))
    assert difference(left, right) == 'rank 1 differs from rank 0 at table[a].owner: "beta" against "alpha"'

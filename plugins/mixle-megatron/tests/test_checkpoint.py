"""Megatron's state through the one checkpoint format: any tp, pp, ep and data size to any other, and an exact resume on the same."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mixle_core as mx
from mixle_core.audit.compare import relative_error
from mixle_core.checkpoint import open_checkpoint
from mixle_core.runtime import save_state, solo_group
from mixle_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from models import batch, model, next_token_loss, plugins

Plan = mx.ParallelPlan

PLANS = {
    "one": Plan(microbatches=4),
    "dp2": Plan(dp_replicate=2, microbatches=2),
    "dp2 sharded": Plan(dp_shard=2, microbatches=2),
    "tp2": Plan(tp=2, microbatches=4),
    "tp2 x pp2": Plan(tp=2, pp=2, microbatches=4),
    "dp2 x tp2 sharded, sequence parallel": Plan(dp_shard=2, tp=2, sequence_parallel=True, microbatches=2),
}
EXPERTS = {
    "one": Plan(microbatches=4),
    "ep2 sharded": Plan(dp_shard=2, ep=2, microbatches=2),
    "ep2 x tp2": Plan(dp_replicate=2, tp=2, ep=2, etp=1, sequence_parallel=True, microbatches=2),
    "ep2 x pp2": Plan(dp_replicate=2, pp=2, ep=2, microbatches=2),
}
FAMILIES = {"tiny-tied": PLANS, "tiny-moe": EXPERTS}


def session_of(size: str, plan: mx.ParallelPlan, **fields: Any) -> Any:
    if plan.world_size == 1:
        solo_group("test")  # a model that is built before any process group exists cannot run in one process
    return mx.prepare(
        model(size, **fields)(),
        plan,
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, weight_decay=0.1),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.9**update),
        max_grad_norm=1.0,
        seed=0,
        plugins=plugins(),
        backend="megatron" if plan.world_size > 1 else None,
    )


def rows(session: Any, update: int) -> torch.Tensor:
    """Four microbatches of two rows in all, shared out over the data ranks."""
    at, plan = session.reduction.mesh.coordinates, session.plan
    mine = range(4)[at["dp_replicate"] * plan.dp_shard + at["dp_shard"] :: plan.data_size]
    return torch.cat([batch(update, number, 0) for number in mine])


def trained(size: str, name: str, root: str) -> None:
    session = session_of(size, FAMILIES[size][name])
    for update in range(2):
        session.train_batch(rows(session, update))
    session.save(f"{root}/{name}", metadata={"by": name})
    session.close()


def loaded(size: str, name: str, root: str) -> dict[str, Any]:
    """From each plan's checkpoint: whether the state is equal to the bit, and the next update's numbers."""
    found = {}
    for other in FAMILIES[size]:
        session = session_of(size, FAMILIES[size][name])
        step = session.load(f"{root}/{other}")
        assert step is not None and step.same_ranks == (name == other) and session.update == 2
        equal = True
        with open_checkpoint(step.path) as checkpoint:
            for entry in save_state(session.reduction, session.optimizers):
                saved = checkpoint.read(entry.name, entry.kind, entry.offset, tuple(entry.tensor.shape))
                equal = equal and torch.equal(saved, entry.tensor.detach())
        receipt = session.train_batch(rows(session, 2))
        session.save(f"{root}/{name} after {other}")
        found[other] = equal, receipt.loss, receipt.grad_norm, receipt.learning_rate
        session.close()
    return found


def values(path: str) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        shapes = {
            name: checkpoint.stored(name, "parameter").shape for name, kinds in checkpoint.metadata.tensors.items() if "parameter" in kinds
        }
        return {name: checkpoint.read(name, "parameter", (0,) * len(shape), shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("size", FAMILIES)
def test_what_any_plan_saved_is_equal_under_any_other_and_trains_on_as_one_process(size, tmp_path):
    root = str(tmp_path)
    for name, plan in FAMILIES[size].items():
        run_ranks(trained, plan.world_size, size, name, root, reuse=True)
    wanted = run_ranks(loaded, 1, size, "one", root, reuse=True)[0].value
    for name, plan in FAMILIES[size].items():
        if name == "one":
            continue
        for outcome in run_ranks(loaded, plan.world_size, size, name, root, reuse=True):
            for other, (equal, *numbers) in outcome.value.items():
                assert equal, (name, other)
                assert numbers == pytest.approx(wanted[other][1:], rel=1e-5), (name, other)
        for other in FAMILIES[size]:
            ours, theirs = (values(f"{root}/{who} after {other}/step-00000003") for who in (name, "one"))
            assert ours.keys() == theirs.keys()
            assert max(relative_error(ours[key], theirs[key]) for key in theirs) <= 1e-5, (name, other)


def unbroken(name: str, root: str, begin: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    session = session_of("tiny", PLANS[name], hidden_dropout=0.1, attention_dropout=0.1)
    if not begin:
        session.load(root)
    trail = []
    for update in range(session.update, 12):
        receipt = session.train_batch(rows(session, update))
        trail.append((receipt.loss, receipt.grad_norm, receipt.learning_rate))
        if begin and session.update == 2:
            session.save(root)
    return trail, {name: p.detach().clone() for name, p in session.reduction.named_parameters()}


@pytest.mark.parametrize("name", ["tp2", "tp2 x pp2", "dp2 x tp2 sharded, sequence parallel"])
def test_ten_updates_after_a_resume_are_those_of_the_unbroken_run_to_the_bit_with_dropout(name, tmp_path):
    size = PLANS[name].world_size
    first = run_ranks(unbroken, size, name, str(tmp_path), True)
    for one, other in zip(first, run_ranks(unbroken, size, name, str(tmp_path), False), strict=True):
        assert other.value[0] == one.value[0][2:]
        assert other.value[1].keys() == one.value[1].keys()
        assert all(torch.equal(value, one.value[1][key]) for key, value in other.value[1].items())

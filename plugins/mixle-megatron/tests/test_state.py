"""State by logical name and global offset: whole under every plan, and loadable under any other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mixle_core as mx
from mixle_core.audit.verification import adamw, reference_model
from mixle_core.runtime import StateEntry, load_state, logical_parameters, save_state
from mixle_core.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from models import batch, model, next_token_loss, plugins

Plan = mx.ParallelPlan

PLANS = {
    "dp4-sharded": Plan(dp_shard=4),
    "tp2xpp2": Plan(tp=2, pp=2, microbatches=2),
    "dp2xtp2-sp-sharded": Plan(dp_shard=2, tp=2, sequence_parallel=True),
    "dp2xpp2-sharded": Plan(dp_shard=2, pp=2, microbatches=2),
    "dp2xtp2": Plan(dp_replicate=2, tp=2),
}
EXPERTS = {
    "ep2xtp2-sharded": Plan(dp_shard=2, tp=2, ep=2, etp=1, sequence_parallel=True),
    "ep2xpp2-sharded": Plan(dp_shard=2, pp=2, ep=2, microbatches=2),
    "ep4": Plan(dp_replicate=4, ep=4),
}


class Assembled:
    """A reader over the entries of all ranks; refuses gaps and blocks that disagree."""

    def __init__(self, everyone: list[tuple[StateEntry, ...]]) -> None:
        self.whole: dict[tuple[str, str], torch.Tensor] = {}
        seen: dict[tuple[str, str], torch.Tensor] = {}
        for entry in (entry for entries in everyone for entry in entries):
            key = entry.name, entry.kind
            whole = self.whole.setdefault(key, torch.zeros(entry.shape))
            covered = seen.setdefault(key, torch.zeros(entry.shape, dtype=torch.bool))
            at = tuple(slice(o, o + n) for o, n in zip(entry.offset, entry.tensor.shape, strict=True))
            both = covered[at]
            assert torch.equal(whole[at][both], entry.tensor[both]), f"{key}: copies differ"
            whole[at] = entry.tensor
            covered[at] = True
        gaps = [key for key, covered in seen.items() if not bool(covered.all())]
        assert not gaps, gaps

    def kinds(self, name: str) -> set[str]:
        return {kind for known, kind in self.whole if known == name}

    def read(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return self.whole[name, kind][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def data_batches(update: int, number: int) -> list[torch.Tensor]:
    """The same rows for every plan: `number` microbatches of the update."""
    return [batch(update, index, 0) for index in range(number)]


class Trained:
    """One plan, trained by hand on four microbatches an update, shared out over its data ranks."""

    def __init__(self, size: str, plan: mx.ParallelPlan) -> None:
        self.reduction = mx.attach(model(size)(), plan, backend="megatron", plugins=plugins(), seed=0)
        optimizer = self.reduction.build_optimizer(adamw)
        assert optimizer is not None
        self.optimizers = {"**": optimizer}

    def update(self, number: int) -> None:
        at, plan = self.reduction.mesh.coordinates, self.reduction.mesh.plan
        data_rank = at["dp_replicate"] * plan.dp_shard + at["dp_shard"]
        mine = data_batches(number, 4)[data_rank :: plan.data_size]
        loss, tokens = self.reduction.run(mine, next_token_loss)
        self.reduction.finish(tokens, float(loss))
        self.optimizers["**"].step()
        self.reduction.zero()

    def assembled(self) -> Assembled:
        mine = tuple(StateEntry(e.name, e.kind, e.shape, e.offset, e.tensor.clone()) for e in save_state(self.reduction, self.optimizers))
        return Assembled(self.reduction.mesh.gather_objects(mine))


def one_process(size: str, updates: int, like: Any) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    reference = reference_model(model(size), 0, like)
    parameters = dict(logical_parameters(reference))
    optimizer = adamw(parameters.values())
    for number in range(updates):
        tokens = 0
        for ids in data_batches(number, 4):
            loss, count = next_token_loss(reference, ids)
            loss.backward()
            tokens += count
        for parameter in parameters.values():
            parameter.grad /= tokens
        optimizer.step()
        optimizer.zero_grad()
    return parameters, {name: optimizer.state[parameter] for name, parameter in parameters.items()}


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value - reference).norm() / reference.norm().clamp_min(1e-30))


def saved_and_loaded(size: str, first: mx.ParallelPlan, second: mx.ParallelPlan) -> tuple[float, float, bool]:
    """Largest error of the state after two updates, of the parameters after a third under another plan; whether loading was exact."""
    torch.set_num_threads(1)
    trained = Trained(size, first)
    for number in range(2):
        trained.update(number)
    saved = trained.assembled()
    parameters, state = one_process(size, 2, trained.reduction)
    assert {name for name, _ in saved.whole} == parameters.keys()
    assert {kind for _, kind in saved.whole} == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    worst = 0.0
    for (name, kind), value in saved.whole.items():
        wanted = parameters[name].detach() if kind == "parameter" else state[name][kind]
        # second moments are squares: twice the relative error
        worst = max(worst, error(value, wanted) / (2 if kind == "exp_avg_sq" else 1))
    trained.reduction.close()
    other = Trained(size, second)
    other.update(7)  # its state is another one now
    loaded = load_state(other.reduction, other.optimizers, saved)
    again = other.assembled()
    exact = saved.whole.keys() == again.whole.keys() and all(torch.equal(value, again.whole[key]) for key, value in saved.whole.items())
    assert loaded <= parameters.keys()
    other.update(2)
    after, _ = one_process(size, 3, other.reduction)
    last = max(error(value, after[name].detach()) for (name, kind), value in other.assembled().whole.items() if kind == "parameter")
    return worst, last, exact


def pairs(plans: dict[str, mx.ParallelPlan]) -> list[tuple[str, str]]:
    names = list(plans)
    return [(name, names[(i + 1) % len(names)]) for i, name in enumerate(names)]


@pytest.mark.parametrize(("first", "second"), pairs(PLANS), ids=lambda name: name)
def test_a_dense_model_is_saved_under_one_plan_and_goes_on_under_another(first, second):
    for outcome in run_ranks(saved_and_loaded, 4, "tiny-tied", PLANS[first], PLANS[second], timeout_s=180, reuse=True):
        worst, last, exact = outcome.value
        assert worst < 1e-5
        assert exact
        assert last < 1e-5


@pytest.mark.parametrize(("first", "second"), pairs(EXPERTS), ids=lambda name: name)
def test_experts_too(first, second):
    for outcome in run_ranks(saved_and_loaded, 4, "tiny-moe", EXPERTS[first], EXPERTS[second], timeout_s=180, reuse=True):
        worst, last, exact = outcome.value
        assert worst < 1e-5
        assert exact
        assert last < 1e-5

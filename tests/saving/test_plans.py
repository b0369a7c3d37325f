"""Saved under every plan and loaded under every other: equal to the bit, and the next update is that of one process; same plan: exact."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import toys

import mixle_core as mx
from mixle_core.audit import relative_error
from mixle_core.checkpoint import open_checkpoint
from mixle_core.testing import run_ranks

WIDER = {**toys.PLANS, "tp4": mx.ParallelPlan(tp=4)}


def without_dropout():
    model = toys.build()
    model.dropout.p = 0.0
    return model


def saved(name: str, root: str):
    """Two updates, then a save; the state at that moment."""
    plan = WIDER[name]
    session = toys.make(plan, build=without_dropout)
    for update in range(2):
        session.train_batch(toys.rows(plan, update))
    session.save(f"{root}/{name}", metadata={"by": name})
    state = toys.whole_state(session)
    session.close()
    return state


def loaded(name: str, root: str):
    """From each plan's checkpoint: the state, and the parameters after one more update."""
    plan = WIDER[name]
    found = {}
    for other in WIDER:
        session = toys.make(plan, build=without_dropout)
        said = session.load(f"{root}/{other}")
        assert (said.step, said.metadata, session.update, said.same_ranks) == (2, {"by": other}, 2, other == name)
        state = toys.whole_state(session)
        receipt = session.train_batch(toys.rows(plan, 2))
        found[other] = state, toys.whole_state(session), receipt.learning_rate
        session.close()
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = str(tmp_path_factory.mktemp("runs"))
    return root, {name: run_ranks(saved, plan.world_size, name, root, reuse=True)[0].value for name, plan in WIDER.items()}


@pytest.fixture(scope="module")
def reference(checkpoints):
    """What one process makes of every checkpoint."""
    return run_ranks(loaded, 1, "one", checkpoints[0], reuse=True)[0].value


@pytest.mark.parametrize("name", WIDER)
def test_what_any_plan_saved_is_equal_under_this_one_and_trains_on_as_one_process(name, checkpoints, reference):
    root, states = checkpoints
    for outcome in run_ranks(loaded, WIDER[name].world_size, name, root, reuse=True):
        for other, (state, after, rate) in outcome.value.items():
            assert state.keys() == states[other].keys()
            assert {key for key, value in state.items() if not torch.equal(value, states[other][key])} == set(), other
            worst = max(relative_error(value, reference[other][1][key]) for key, value in after.items() if key.startswith("parameter"))
            assert worst <= 1e-5, other
            assert rate == reference[other][2]


def test_a_checkpoint_holds_what_the_ranks_had_whole_and_the_parts_of_a_fused_matrix_in_place(checkpoints):
    root, states = checkpoints
    for name, state in states.items():
        with open_checkpoint(f"{root}/{name}/step-00000002") as checkpoint:
            for key, value in state.items():
                kind, _, parameter = key.partition(":")
                assert torch.equal(checkpoint.read(parameter, kind, (0,) * value.dim(), tuple(value.shape)), value), (name, key)
            checkpoint.verify()


# ---- the same plan: ten updates to the bit -------------------------------------------------------------------------

ACCUMULATION = 2


class Drawing:
    """A loader that shuffles with generators of its own, in the middle of an epoch."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def trained(name: str, root: str, begin: bool, updates: int):
    plan = mx.ParallelPlan(**{**toys.PLANS[name].as_dict(), "gradient_accumulation_steps": ACCUMULATION})
    session = toys.make(plan)
    loader = Drawing()
    if not begin:
        torch.rand(7)  # whatever was drawn before a load does not count
        session.load(root, state={"loader": loader})
    trail = []
    for _ in range(updates):
        for _ in range(ACCUMULATION):
            receipt = session.train_batch(toys.rows(plan, loader.position))
            loader.position += 1
        trail.append((receipt.loss, receipt.grad_norm, receipt.learning_rate, toys.drawn()))
        if begin and session.update == 2:
            session.save(root, state={"loader": loader})
    buffer = int(session.reduction.model.seen)
    return trail, toys.whole_state(session), loader.position, buffer


@pytest.mark.parametrize("name", toys.PLANS)
def test_ten_updates_after_a_resume_are_those_of_the_unbroken_run_to_the_bit(name, tmp_path):
    size = toys.PLANS[name].world_size
    unbroken = run_ranks(trained, size, name, str(tmp_path), True, 12)
    resumed = run_ranks(trained, size, name, str(tmp_path), False, 10)
    for one, other in zip(unbroken, resumed, strict=True):
        trail, state, position, buffer = one.value
        assert other.value[0] == trail[2:]
        assert other.value[1].keys() == state.keys() and all(torch.equal(value, state[key]) for key, value in other.value[1].items())
        assert other.value[2:] == (position, buffer) == (24, 24)
    # dropout and the generators were at work, and ranks with other data drew other numbers
    draws = [tuple(step[3][0] for step in outcome.value[0]) for outcome in unbroken]
    assert len(set(draws)) == toys.PLANS[name].data_size


def cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20)


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)  # whose state is no plain dict


def sequence(optimizer):
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [linear, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)], [2])


def more_optimizers(name: str, root: str, kind: str, begin: bool):
    plan = toys.PLANS[name]
    optimizers = {
        "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
        "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        "nadam": partial(torch.optim.NAdam, lr=1e-2),
        "routes": {"**.{weight}": partial(torch.optim.AdamW, lr=1e-2), "**.bias": partial(torch.optim.SGD, lr=1e-3)},
    }
    session = toys.make(
        plan, build=without_dropout, optimizer=optimizers[kind], schedule={"nadam": sequence, "routes": milestones}.get(kind, cycle)
    )
    if not begin:
        session.load(root)
    for update in range(session.update, 4):
        session.train_batch(toys.rows(plan, update))
        if begin and session.update == 2:
            session.save(root)
    return toys.whole_state(session), [group["lr"] for o in session.optimizers.values() for group in o.param_groups]


@pytest.mark.parametrize("kind", ["sgd", "amsgrad", "nadam", "routes"])
def test_other_optimizers_and_schedules_resume_to_the_bit(kind, tmp_path):
    for name in ("one", "fsdp2 x tp2"):
        size, root = toys.PLANS[name].world_size, str(tmp_path / name.replace(" ", ""))
        unbroken = run_ranks(more_optimizers, size, name, root, kind, True, reuse=True)[0].value
        resumed = run_ranks(more_optimizers, size, name, root, kind, False, reuse=True)[0].value
        assert resumed[1] == unbroken[1]
        assert resumed[0].keys() == unbroken[0].keys()
        assert all(torch.equal(value, unbroken[0][key]) for key, value in resumed[0].items())

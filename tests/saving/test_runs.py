"""Runs of steps, groups of optimizers, and what must not be lost, mixed or taken for equal in silence."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import toys
from toys import DDP2, Thing, Two, attempt, batch, loss, rank, trained

import mixle_core as mx
from mixle_core.checkpoint import CheckpointError, steps
from mixle_core.runtime import load_training_state, save_training_state
from mixle_core.testing import next_token_loss, run_ranks


def plain_run(root: str, groups, *, step: int = 1, cls=torch.optim.AdamW, **options):
    """One process without a session: two linears, stepped once with `groups` (name -> options), saved."""
    model = Two()
    optimizer = cls([{"params": list(getattr(model, name).parameters()), **more} for name, more in groups])
    loss(model, batch(0, both=True))[0].backward()
    optimizer.step()
    save_training_state(model, optimizer, root, step=step, **options)
    return model, optimizer


def lambda_lr(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_save_below_a_later_step_is_refused_so_that_a_load_and_keep_mean_the_newest(tmp_path):
    for step in (5, 20):
        plain_run(str(tmp_path), [("a", {}), ("b", {})], step=step)
    with pytest.raises(CheckpointError, match="step 20 is committed already; expected none after step 6"):
        plain_run(str(tmp_path), [("a", {}), ("b", {})], step=6, keep=1)
    assert [entry.step for entry in steps(tmp_path)] == [5, 20]


def test_a_damaged_step_steps_aside_for_the_run_that_goes_on_before_it(tmp_path):
    model, optimizer = plain_run(str(tmp_path), [("a", {}), ("b", {})], step=3)
    plain_run(str(tmp_path), [("a", {}), ("b", {})], step=4)
    (tmp_path / "step-00000004" / "_SUCCESS").write_bytes(b"{}")
    assert load_training_state(model, optimizer, tmp_path).step == 3
    save_training_state(model, optimizer, tmp_path, step=4)
    assert [entry.step for entry in steps(tmp_path)] == [3, 4]
    assert [child.name for child in tmp_path.iterdir() if ".damaged-" in child.name] != []


def test_groups_in_another_order_keep_their_rates_and_schedules(tmp_path):
    model, optimizer = plain_run(str(tmp_path / "x"), [("a", {"lr": 0.1}), ("b", {"lr": 0.01})])
    schedule = lambda_lr(optimizer)
    save_training_state(model, optimizer, tmp_path / "run", step=1, scheduler=schedule)
    again = Two()
    other = torch.optim.AdamW([{"params": list(again.b.parameters()), "lr": 0.01}, {"params": list(again.a.parameters()), "lr": 0.1}])
    turned = lambda_lr(other)
    load_training_state(again, other, tmp_path / "run", scheduler=turned)
    other.step()
    turned.step()
    assert [group["lr"] for group in other.param_groups] == [0.005, 0.05]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("split", "groups [0, 1], whose options differ, were one group when it was saved"),
        ("new member", "b.bias (2 such) was not stepped by it when it was saved"),
        ("left out", "b.bias (2 such) was stepped by optimizer '**', and none here steps it"),
        ("no scheduler", "scheduler '**' was saved, and none is given here"),
        ("another model's", "has a parameter of shape [3] that is none of the model's"),
    ],
)
def test_what_would_be_lost_or_mixed_in_silence_is_refused(what, text, tmp_path):
    saved = [("a", {}), ("b", {})] if what in ("left out", "no scheduler") else [("a", {})] if what == "new member" else None
    model = Two()
    if saved is None:
        optimizer = torch.optim.AdamW(model.parameters())
        save_training_state(model, optimizer, tmp_path, step=1)
    else:
        _, optimizer = plain_run(str(tmp_path / "x"), saved)
        model, optimizer = plain_run(str(tmp_path), saved)
    scheduler = lambda_lr(optimizer) if what == "no scheduler" else None
    if scheduler is not None:
        save_training_state(model, optimizer, tmp_path, step=2, scheduler=scheduler)
    again = Two()
    ours = {
        "split": lambda: torch.optim.AdamW(
            [{"params": list(again.a.parameters()), "weight_decay": 0.5}, {"params": list(again.b.parameters())}]
        ),
        "new member": lambda: torch.optim.AdamW(again.parameters()),
        "left out": lambda: torch.optim.AdamW(again.a.parameters()),
        "no scheduler": lambda: torch.optim.AdamW([{"params": list(again.a.parameters())}, {"params": list(again.b.parameters())}]),
        "another model's": lambda: torch.optim.AdamW([*again.parameters(), nn.Parameter(torch.ones(3))]),
    }[what]()
    with pytest.raises(CheckpointError) as error:
        load_training_state(again, ours, tmp_path)
    assert text in str(error.value)


def test_what_is_skipped_on_purpose_stays_as_it_is_here(tmp_path):
    model, optimizer = plain_run(str(tmp_path / "x"), [("a", {"lr": 0.1}), ("b", {"lr": 0.1})])
    save_training_state(model, optimizer, tmp_path / "run", step=7, scheduler=lambda_lr(optimizer))
    again = Two()
    other = torch.optim.AdamW([{"params": list(again.a.parameters())}, {"params": list(again.b.parameters())}], lr=0.3)
    load_training_state(again, other, tmp_path / "run", skip=("scheduler",))
    assert [group["lr"] for group in other.param_groups] == [0.3, 0.3] and len(other.state) == 4
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    sgd = torch.optim.SGD(again.parameters(), lr=1.0)
    load_training_state(again, sgd, tmp_path / "run", skip=("optimizer", "generators"))
    assert torch.equal(torch.rand(3), wanted) and torch.equal(again.a.weight, model.a.weight) and not sgd.state
    with pytest.raises(mx.UsageError, match="skip='everything'; expected some of generators, optimizer, scheduler"):
        load_training_state(again, sgd, tmp_path / "run", skip=("everything",))


class Extra(nn.Module):
    """State that is neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2)), 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_of_modules_and_rates_in_tensors_come_back(tmp_path):
    model = nn.Sequential(Extra())
    model[0].seen = 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), capturable=False, foreach=False)
    save_training_state(model, optimizer, tmp_path, step=1)
    again = nn.Sequential(Extra())
    other = torch.optim.AdamW(again.parameters(), lr=torch.tensor(0.5), foreach=False)
    load_training_state(again, other, tmp_path)
    assert again[0].seen == 7 and isinstance(other.param_groups[0]["lr"], torch.Tensor) and float(other.param_groups[0]["lr"]) == 0.25
    plain = nn.Sequential(nn.Identity())
    plain[0].weight = nn.Parameter(torch.ones(2))
    with pytest.raises(CheckpointError, match="extra state of module 0 is saved, and not known here"):
        load_training_state(plain, torch.optim.AdamW(plain.parameters(), lr=0.5, foreach=False), tmp_path)


def shuffled_or_negated(root: str, what: str):
    session = trained(DDP2)
    with torch.no_grad():
        if what == "order":
            state = {"order": torch.randperm(4096, generator=torch.Generator().manual_seed(rank()))}
            session.save(root, state={"own": Thing(state)})
            again = Thing(None)
            session.load(root, state={"own": again})
            return torch.equal(again.state["order"], state["order"])
        weight = dict(session.reduction.named_parameters())["head.weight"]
        weight.mul_(-1.0 if rank() else 1.0)
    return attempt(lambda: session.save(root))


def test_copies_with_the_same_words_in_another_order_or_with_other_signs_are_not_equal(tmp_path):
    assert all(outcome.value for outcome in run_ranks(shuffled_or_negated, 2, str(tmp_path / "a"), "order", reuse=True))
    for outcome in run_ranks(shuffled_or_negated, 2, str(tmp_path / "b"), "signs", reuse=True):
        assert "head.weight (parameter) differs between rank 0 and rank 1" in outcome.value


def test_the_sums_that_stand_for_a_checksum_on_a_device_tell_the_same():
    from mixle_core.runtime.saving.plain import sums_of_words

    def of(values):
        return sums_of_words(values.contiguous().view(-1).view(torch.uint8))

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values = torch.randn(70_001, generator=generator).to(dtype)
        changed = values.clone()
        changed[-1] += 1
        assert len({of(values), of(-values), of(values.flip(0)), of(values.roll(1)), of(changed)}) == 5
        assert of(values) == of(values.clone())


def half_loaded(root: str):
    session = trained(DDP2)
    session.save(root)
    (data,) = Path(root, "step-00000001").glob("data-00000*")
    if rank() == 0:
        raw = bytearray(data.read_bytes())
        raw[-20] ^= 1
        data.write_bytes(raw)
    dist.barrier()
    said = attempt(lambda: session.load(root))
    evaluated = attempt(lambda: session.evaluate([toys.rows(DDP2, 0)]))
    saved = attempt(lambda: session.save(root + "2"))
    return said, evaluated, saved


def test_after_a_load_that_failed_halfway_nothing_evaluates_trains_or_is_saved(tmp_path):
    for outcome in run_ranks(half_loaded, 2, str(tmp_path / "run"), reuse=True):
        said, evaluated, saved = outcome.value
        assert "as they were written" in said
        assert (
            evaluated == saved == "UsageError: a load failed halfway, so parameters and optimizer are undefined; load a step, or start anew"
        )


def own_loop(root: str):
    reduction = mx.attach(toys.build(), DDP2, seed=0)
    optimizer = reduction.build_optimizer(partial(torch.optim.AdamW, lr=0.1))
    loss_sum, tokens = reduction.run([toys.rows(DDP2, 0)], next_token_loss)
    inside = attempt(lambda: save_training_state(reduction, optimizer, root, step=0))
    reduction.finish(tokens, float(loss_sum))
    optimizer.step()
    reduction.zero()
    save_training_state(reduction, optimizer, root, step=reduction.update)
    other = mx.attach(toys.build(), DDP2, seed=0)
    load_training_state(other, other.build_optimizer(partial(torch.optim.AdamW, lr=0.1)), root)
    return inside, other.update


def test_an_own_loop_counts_on_after_a_load_and_saves_between_updates_only(tmp_path):
    for outcome in run_ranks(own_loop, 2, str(tmp_path), reuse=True):
        inside, update = outcome.value
        assert inside.startswith("UsageError: save: the window of update 0 is open") and update == 1


def drawing(root: str, begin: bool):
    """A plain module on other ranks than those that saved: without a word of who sees which rows, all draw alike."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if begin:
        save_training_state(model, optimizer, root, step=1)
        return None
    load_training_state(model, optimizer, root)
    alike = torch.rand(2).tolist()
    load_training_state(model, optimizer, root, data_rank=rank())
    return alike, torch.rand(2).tolist()


def test_a_module_that_no_plan_speaks_for_draws_alike_on_other_ranks_unless_it_says_who_differs(tmp_path):
    run_ranks(drawing, 1, str(tmp_path), True, reuse=True)
    first, second = (outcome.value for outcome in run_ranks(drawing, 2, str(tmp_path), False, reuse=True))
    assert first[0] == second[0] and first[1] != second[1]

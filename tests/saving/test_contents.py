"""What is in a checkpoint beside the parameters, what is refused when saving or loading, and who is told."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import toys
from toys import DDP2, FSDP2, Thing, Two, attempt, batch, loss, rank, trained

import mixle_core as mx
from mixle_core.checkpoint import CheckpointError, open_checkpoint, steps
from mixle_core.runtime import load_training_state, save_training_state
from mixle_core.testing import run_ranks

Plan = mx.ParallelPlan


# ---- state of others ------------------------------------------------------------------------------------------------


def with_state(root: str):
    session = trained(DDP2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    scaler.scale(torch.ones(()))
    odd = {"inf": float("inf"), 3: (1, None, b"x"), "order": torch.arange(5) * (rank() + 1)}
    state = {"same": Thing({"a": [1, 2.5]}), "own": Thing({"rank": rank(), **odd}), "plain": {"k": 1}, "scaler": scaler}
    session.save(root, state=state, metadata={"why": "test", "at": (1, 2)})
    same, own, again = Thing(None), Thing(None), torch.amp.GradScaler("cpu")
    loaded = session.load(root, state={"same": same, "own": own, "plain": None, "scaler": again})
    return same.state, own.state, loaded.state, loaded.metadata, again.get_scale()


def test_state_of_others_is_put_back_on_the_rank_it_came_from(tmp_path):
    for number, outcome in enumerate(run_ranks(with_state, 2, str(tmp_path), reuse=True)):
        same, own, plain, metadata, scale = outcome.value
        assert same == {"a": [1, 2.5]} and plain == {"plain": {"k": 1}} and metadata == {"why": "test", "at": (1, 2)} and scale == 2.0**11
        assert torch.equal(own.pop("order"), torch.arange(5) * (number + 1))
        assert own == {"rank": number, "inf": float("inf"), 3: (1, None, b"x")}


def on_one_rank(root: str):
    session = toys.make(Plan())
    same = Thing(None)
    session.load(root, state={"same": same})
    return (
        same.state,
        attempt(lambda: session.load(root, state={"own": Thing(None)})),
        attempt(lambda: session.load(root, state={"no": same})),
    )


def test_state_that_differs_between_ranks_is_refused_on_other_ranks(tmp_path):
    run_ranks(with_state, 2, str(tmp_path), reuse=True)
    (outcome,) = run_ranks(on_one_rank, 1, str(tmp_path), reuse=True)
    same, own, no = outcome.value
    assert same == {"a": [1, 2.5]}
    assert "state 'own' was another one on each rank, and the ranks are others now" in own
    assert "no state 'no'; there are own, plain, same, scaler" in no


def unstorable(root: str, what: str):
    session = trained(DDP2)
    given = {
        "object": {"state": {"thing": {"inner": [object()]}} if rank() else {}},
        "lambda": {"metadata": {"f": len}},
        "numpy": {"state": {"a": __import__("numpy").ones(2)}},
        "unlike": {"metadata": {"rank": rank()}},
    }[what]
    said = attempt(lambda: session.save(root, **given))
    return (
        said,
        [entry.step for entry in steps(root)] if Path(root).exists() else [],
        list(Path(root).iterdir()) if Path(root).exists() else [],
    )


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("object", "rank 1: thing['inner'][0]: cannot store a builtins.object"),
        ("lambda", "metadata['f']: cannot store a builtins.builtin_function_or_method"),
        ("numpy", "a: cannot store a numpy.ndarray"),
        ("unlike", "metadata differs between rank 0 and rank 1; expected the same on every rank that has it"),
    ],
)
def test_what_cannot_be_stored_is_refused_on_all_ranks_with_its_key_and_type(what, text, tmp_path):
    for outcome in run_ranks(unstorable, 2, str(tmp_path / "run"), what, reuse=True):
        said, committed, left = outcome.value
        assert said.startswith("CheckpointError: ") and text in said, said
        assert committed == [] and left == []


# ---- parameters that were never used, frozen ones, buffers -----------------------------------------------------------


def two(plan, **options):
    build = options.pop("build", Two)
    return mx.prepare(build(), plan, loss=loss, optimizer=partial(torch.optim.AdamW, lr=0.1), **options)


def unused(root: str, plan):
    plan = Plan(**{**plan.as_dict(), "unused_parameters": True})
    first = two(plan)
    first.train_batch(batch(0, both=False))
    first.save(root)
    first.train_batch(batch(1, both=True))
    second = two(plan)
    second.load(root)
    held = {name for name, p in second.reduction.named_parameters() if second.optimizers["**"].state.get(p)}
    second.train_batch(batch(1, both=True))
    ours, theirs = toys.whole_state(second), toys.whole_state(first)
    return held, ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("plan", [DDP2, FSDP2])
def test_a_parameter_without_state_comes_back_without_and_starts_fresh(plan, tmp_path):
    """C39."""
    for outcome in run_ranks(unused, 2, str(tmp_path), plan, reuse=True):
        assert outcome.value == ({"a.weight", "a.bias"}, True)


def frozen_after_training(root: str):
    """Without a session: the optimizer still holds what was frozen."""
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model, batch(0, both=True))[0].backward()
    optimizer.step()
    model.b.requires_grad_(False)
    save_training_state(model, optimizer, root, step=1)
    again = Two()
    other = torch.optim.AdamW(again.parameters(), lr=0.1)
    load_training_state(again, other, root)
    return torch.equal(other.state[again.b.weight]["exp_avg"], optimizer.state[model.b.weight]["exp_avg"])


def test_the_state_of_what_was_frozen_after_training_survives(tmp_path):
    assert run_ranks(frozen_after_training, 1, str(tmp_path), reuse=True)[0].value


def statistics(root: str, begin: bool, plan):
    session = two(plan, build=partial(Two, norm=True))
    if not begin:
        session.load(root)
        return session.reduction.model.norm.running_mean.clone()
    session.train_batch(batch(0, both=False))
    session.save(root)
    return session.reduction.model.norm.running_mean.clone()


def test_buffers_that_differ_between_ranks_come_back_each_on_its_rank_and_elsewhere_as_the_first_ranks(tmp_path):
    saved = [outcome.value for outcome in run_ranks(statistics, 2, str(tmp_path), True, DDP2, reuse=True)]
    assert not torch.equal(*saved)
    for values, outcome in zip(saved, run_ranks(statistics, 2, str(tmp_path), False, DDP2, reuse=True), strict=True):
        assert torch.equal(values, outcome.value)
    assert torch.equal(run_ranks(statistics, 1, str(tmp_path), False, Plan(), reuse=True)[0].value, saved[0])


# ---- generators ------------------------------------------------------------------------------------------------------


def generators(root: str, begin: bool, plan):
    session = toys.make(plan)
    if begin:
        torch.manual_seed(rank())
        session.save(root)
    else:
        session.load(root)
    return [toys.drawn() for _ in range(4)]


def test_each_rank_goes_on_with_its_own_generators_and_on_other_ranks_by_the_rule(tmp_path):
    """C44. By the rule: from seed, step and place among those with other data, so alike for ranks that differ only in tp."""
    root = str(tmp_path)
    first = [o.value for o in run_ranks(generators, 2, root, True, DDP2)]
    assert [o.value for o in run_ranks(generators, 2, root, False, DDP2)] == first and first[0] != first[1]
    four = [o.value for o in run_ranks(generators, 4, root, False, Plan(dp_replicate=2, tp=2))]
    assert four[0] == four[1] != four[2] == four[3]
    assert [o.value for o in run_ranks(generators, 4, root, False, Plan(dp_replicate=2, tp=2))] == four
    assert first[0] not in four


# ---- refusals --------------------------------------------------------------------------------------------------------


def drifted(root: str, which: str):
    plan = DDP2 if which == "ddp" else Plan(tp=2)
    session = trained(plan)
    found = dict(session.reduction.named_parameters())
    with torch.no_grad():
        if which == "state":
            session.optimizers["**"].state[found["norm.weight"]]["exp_avg"][3] += 1e-7 * rank()
        else:
            flat = found["norm.weight"].view(torch.int32)
            flat[5] ^= rank()  # one bit
    return attempt(lambda: session.save(root))


@pytest.mark.parametrize(("which", "kind"), [("ddp", "parameter"), ("tp", "parameter"), ("state", "exp_avg")])
def test_copies_that_differ_are_refused_before_writing_with_parameter_and_ranks(which, kind, tmp_path):
    """N3: one flipped bit in one replica."""
    for outcome in run_ranks(drifted, 2, str(tmp_path / "run"), which, reuse=True):
        assert f"norm.weight ({kind}) differs between rank 0 and rank 1 (other values), which hold copies of it" in outcome.value
    assert not (tmp_path / "run").exists()


def alone(root: str, call: str):
    session = trained(DDP2)
    session.save(root)
    started = time.monotonic()
    said = attempt(lambda: getattr(session, call)(root if call == "load" else root + "2", wait_s=2.0)) if rank() == 0 else "not called"
    return said, time.monotonic() - started


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_call_on_one_rank_only_is_an_error_soon(call, tmp_path):
    """C46. The default is 20 seconds."""
    first, second = run_ranks(alone, 2, str(tmp_path), call)
    assert "rank 1 did not call it within 2 s; every rank calls it" in first.value[0] and first.value[1] < 10
    assert second.value[0] == "not called"


def in_a_window(root: str):
    plan = Plan(dp_replicate=2, gradient_accumulation_steps=3)
    session = toys.make(plan)
    session.train_batch(toys.rows(plan, 0))
    said = attempt(lambda: session.save(root))
    session.finish_accumulation()
    return said, session.save(root).name


def test_within_a_window_of_accumulated_batches_nothing_is_saved(tmp_path):
    for outcome in run_ranks(in_a_window, 2, str(tmp_path), reuse=True):
        said, name = outcome.value
        assert said.startswith("UsageError: save: 1 of 3 batches of the window have run, and their gradients are not saved")
        assert name == "step-00000001"


def twice(root: str):
    session = trained(DDP2)
    path = session.save(root)
    before = {child.name: child.stat().st_mtime_ns for child in path.iterdir()}
    said = attempt(lambda: session.save(root))
    return said, before == {child.name: child.stat().st_mtime_ns for child in path.iterdir()}


def test_a_committed_step_is_never_written_again(tmp_path):
    """C40."""
    for outcome in run_ranks(twice, 2, str(tmp_path), reuse=True):
        assert "the step is committed already" in outcome.value[0] and outcome.value[1]


def misfit(root: str, what: str):
    session = {
        "other model": lambda: two(DDP2),
        "other shape": lambda: toys.make(DDP2, build=wider),
        "other optimizer": lambda: toys.make(DDP2, optimizer=partial(torch.optim.SGD, lr=0.1)),
        "other schedule": lambda: toys.make(DDP2, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)),
        "other dtype": lambda: toys.make(DDP2, build=double),
    }[what]()
    said = attempt(lambda: session.load(root))
    return said, attempt(lambda: session.train_batch(toys.rows(DDP2, 0)))


def wider():
    model = toys.build()
    model.head = nn.Linear(16, 40, bias=False)
    return model


def double():
    return toys.build().double()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("other model", "no parameter a.bias (4 missing); expected the model that was saved"),
        ("other shape", "head.weight (parameter) was saved as torch.float32 of shape [32, 16]; expected torch.float32 of shape [40, 16]"),
        ("other optimizer", "optimizer '**' is a SGD here, and AdamW was saved"),
        ("other schedule", "scheduler '**' differs from the saved one in 'T_max' (StepLR here)"),
        ("other dtype", "was saved as torch.float32 of shape [16]; expected torch.float64 of shape [16]"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values_and_nothing_trains_on(what, text, tmp_path):
    run_ranks(save_one, 2, str(tmp_path), reuse=True)
    for outcome in run_ranks(misfit, 2, str(tmp_path), what, reuse=True):
        said, after = outcome.value
        assert said.startswith("CheckpointError: rank 0: ") and text in said, said
        assert after == "UsageError: a load failed halfway, so parameters and optimizer are undefined; load a step, or start anew"


def save_one(root: str):
    return trained(DDP2).save(root)


def test_a_directory_without_a_step_says_so_on_every_rank(tmp_path):
    for outcome in run_ranks(nothing_there, 2, str(tmp_path), reuse=True):
        empty, missing = outcome.value
        assert "no committed step; expected one" in empty and "no such directory" in missing


def nothing_there(root: str):
    session = toys.make(DDP2)
    return attempt(lambda: session.load(root)), attempt(lambda: session.load(root + "/none"))


def test_old_steps_go_when_newer_ones_are_committed(tmp_path):
    for outcome in run_ranks(keeping, 2, str(tmp_path), reuse=True):
        assert outcome.value == [3, 4]


def keeping(root: str):
    session = toys.make(DDP2)
    for update in range(4):
        session.train_batch(toys.rows(DDP2, update))
        session.save(root, keep=2)
    return [entry.step for entry in steps(root)]


# ---- without a session -----------------------------------------------------------------------------------------------


def native(plan: str):
    """Plain torch: DistributedDataParallel, fully_shard, parallelize_module, or the last two together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3), nn.Linear(3, 5))  # 3 and 5 rows over 2 ranks: uneven
    if "tp" in plan:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if mesh["dp"].size() > 1:
            fully_shard(model, mesh=mesh["dp"])
    elif plan == "fsdp2":
        fully_shard(model)
    elif plan == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


NATIVE = {"one": 1, "ddp": 2, "fsdp2": 2, "tp": 2, "fsdp2 x tp": 4, "fsdp2 of four": 4}


def native_run(plan: str, root: str, load_from: str | None):
    torch.set_num_threads(1)
    model, optimizer = native("fsdp2" if plan == "fsdp2 of four" else plan)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if load_from is None:
        for update in range(2):
            step_natively(model, optimizer, update)
            schedule.step()
        save_training_state(model, optimizer, f"{root}/{plan}", step=2, scheduler=schedule, metadata=plan)
    else:
        loaded = load_training_state(model, optimizer, f"{root}/{load_from}", scheduler=schedule)
        assert (loaded.step, loaded.metadata) == (2, load_from)
        step_natively(model, optimizer, 2)
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()], optimizer.param_groups[0]["lr"]


def step_natively(model, optimizer, update: int) -> None:
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(update))  # the same on all: whatever averages changes nothing
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_without_a_session_any_native_plan_loads_under_any_other(tmp_path):
    root = str(tmp_path)
    for plan, size in NATIVE.items():
        run_ranks(native_run, size, plan, root, None, reuse=True)
    for plan, size in NATIVE.items():
        for other in NATIVE:
            reference = run_ranks(native_run, 1, "one", root, other, reuse=True)[0].value
            for outcome in run_ranks(native_run, size, plan, root, other, reuse=True):
                values, rate = outcome.value
                assert rate == reference[1] == 0.0025
                for value, wanted in zip(values, reference[0], strict=True):
                    assert float((value - wanted).norm() / wanted.norm()) <= 1e-5, (plan, other)
            with open_checkpoint(f"{root}/{other}/step-00000002") as checkpoint:
                assert set(checkpoint.kinds("0.weight")) == {"parameter", "exp_avg", "exp_avg_sq", "step"}


def cut_by_hand(root: str):
    """A module whose ranks hold different slices in plain tensors: nobody can tell that from copies that drifted apart."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.fill_(rank())
    return attempt(lambda: save_training_state(model, torch.optim.SGD(model.parameters(), lr=0.1), root, step=0))


def test_plain_slices_without_a_declaration_are_refused(tmp_path):
    for outcome in run_ranks(cut_by_hand, 2, str(tmp_path), reuse=True):
        assert "weight (parameter) differs between rank 0 and rank 1" in outcome.value


def tied_by_config_only(root: str):
    """C47: the head was untied by hand; both are in the checkpoint, and a tied model does not take them."""
    from mixle_core.testing import ToyLM

    torch.manual_seed(0)
    model = ToyLM()
    save_training_state(model, torch.optim.SGD(model.parameters(), lr=0.1), root, step=0)
    tied = ToyLM(tied=True)
    said = attempt(lambda: load_training_state(tied, torch.optim.SGD(tied.parameters(), lr=0.1), root))
    again = ToyLM()
    load_training_state(again, torch.optim.SGD(again.parameters(), lr=0.1), root)
    return said, torch.equal(again.head.weight, model.head.weight) and torch.equal(again.embed.weight, model.embed.weight)


def test_a_head_that_is_its_own_is_saved_as_its_own(tmp_path):
    said, equal = run_ranks(tied_by_config_only, 1, str(tmp_path), reuse=True)[0].value
    assert "parameter head.weight, which the model has not (1 such)" in said and equal


def test_the_error_crosses_processes_with_its_text():
    import pickle

    error = CheckpointError("text", path="p", errno="ENOSPC", rank="1")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.path, again.errno, again.rank) == ("text", "p", "ENOSPC", "1")

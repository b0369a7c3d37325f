"""An update that is given up leaves nothing behind: the next one equals one process, or is an error that says why."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch

import mixle_core as mx
from mixle_core.audit import reference_model, relative_error
from mixle_core.runtime import logical_parameters
from mixle_core.testing import ToyLayout, next_token_loss, run_ranks, token_batch, toy_model

Plan = mx.ParallelPlan
PLANS = {
    "ddp2": Plan(dp_replicate=2),
    "fsdp2": Plan(dp_shard=2),
    "hsdp2x2": Plan(dp_replicate=2, dp_shard=2),
    "tp2": Plan(tp=2),
    "ddp2xtp2": Plan(dp_replicate=2, tp=2),
    "fsdp2xtp2": Plan(dp_shard=2, tp=2),
}


def update(reduction, number, data_rank):
    with reduction.no_sync():
        first, tokens = next_token_loss(reduction.module, token_batch(number, 0, data_rank))
        first.backward()
    last, more = next_token_loss(reduction.module, token_batch(number, 1, data_rank))
    last.backward()
    return reduction.finish(tokens + more)


def norms_after_giving_up(plan, given_up_in):
    reduction = mx.attach(toy_model(), plan, plugins={"toy": ToyLayout()})
    at = reduction.mesh.coordinates
    data_rank = at["dp_replicate"] * plan.dp_shard + at["dp_shard"]
    norms = []
    for number in range(4):
        if number == given_up_in:
            with reduction.no_sync():
                next_token_loss(reduction.module, token_batch(9, 0, data_rank))[0].backward()
            reduction.zero()
        norms.append(update(reduction, number, data_rank).norm())
        reduction.zero()
    return norms


@functools.cache
def untouched(plan):
    """Norms where nothing is given up, the same for every update that another run gives up."""
    return run_ranks(norms_after_giving_up, plan.world_size, plan, None, reuse=True)[0].value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("given_up_in", [0, 2])
@pytest.mark.parametrize("name", PLANS)
def test_zero_in_the_middle_of_a_window_leaves_nothing_behind(name, given_up_in, precision):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2, precision=precision)
    found = run_ranks(norms_after_giving_up, plan.world_size, plan, given_up_in, reuse=True)[0].value
    assert found == pytest.approx(untouched(plan), rel=1e-6)


class BrokenError(Exception):
    pass


def session_after_an_exception(plan, failing_batch):
    fail = [False]

    def loss(module, batch):
        out = next_token_loss(module, batch)
        if fail[0]:
            raise BrokenError
        return out

    session = mx.prepare(toy_model(), plan, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), plugins={"toy": ToyLayout()})
    reference = reference_model(toy_model, 0, session.reduction)
    parameters = logical_parameters(reference)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    rank = session.reduction.mesh.rank
    errors = []
    for number in range(4):
        if number == 2:
            try:
                for batch in range(2):
                    fail[0] = batch == failing_batch
                    session.train_batch(token_batch(9, batch, rank))
            except BrokenError:
                fail[0] = False
        try:
            for batch in range(2):
                receipt = session.train_batch(token_batch(number, batch, rank))
        except mx.UsageError as error:
            return str(error)
        tokens = 0
        for data_rank in range(2):
            for batch in range(2):
                value, count = next_token_loss(reference, token_batch(number, batch, data_rank))
                value.backward()
                tokens += count
        for parameter in parameters.values():
            parameter.grad /= tokens
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()])
        optimizer.step()
        optimizer.zero_grad()
        errors.append(relative_error(torch.tensor(receipt.grad_norm), norm))
    return errors


@pytest.mark.parametrize("failing_batch", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize("name", ["ddp2", "fsdp2"])
def test_a_batch_that_raises_takes_its_window_with_it(name, failing_batch):
    plan = attrs.evolve(PLANS[name], gradient_accumulation_steps=2)
    for outcome in run_ranks(session_after_an_exception, 2, plan, failing_batch):
        if (name, failing_batch) == ("ddp2", 1):  # torch cannot disarm the wrapper: an error that says so, never a number
            assert "a forward whose backward should have reduced was given up" in outcome.value
        else:
            assert max(outcome.value) < 1e-5


@pytest.mark.parametrize("name", ["one", *PLANS])
def test_finishing_twice_is_an_error_and_scales_nothing_again(name):
    plan = PLANS.get(name, Plan())
    for outcome in run_ranks(finished_twice, plan.world_size, plan):
        assert "finish() was called twice on the same gradients" in outcome.value


def finished_twice(plan):
    reduction = mx.attach(toy_model(), plan, plugins={"toy": ToyLayout()})
    loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, 0))
    loss.backward()
    reduction.finish(tokens)
    try:
        reduction.finish(tokens)
    except mx.MixleError as error:
        return str(error)
    return "accepted"

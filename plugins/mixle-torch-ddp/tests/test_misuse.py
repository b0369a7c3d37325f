"""What makes DistributedDataParallel train on in silence with wrong gradients is an error on every rank here, or exact."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mixle_core import LedgerError, MixleError, ParallelPlan, UsageError, attach
from mixle_core.audit import relative_error

DDP2 = ParallelPlan(dp_replicate=2, timeout_s=5)
OVERLAPS = ParallelPlan(dp_replicate=2, unused_parameters=False, timeout_s=5)
"""Reduces while the backward runs from the first update on; otherwise from the second on."""


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.late = nn.Linear(2, 2)

    def forward(self, values):
        hidden = self.layer(values)
        if hasattr(self, "extra"):
            hidden = hidden * self.extra
        return self.late(hidden)


def rows(update, backward, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * update + 10 * backward + rank))


def error_of(call):
    try:
        call()
    except MixleError as error:
        return type(error), str(error)
    return None


def update_error(reduced, update, num_backwards):
    """Worst error of the reduced gradients against one process on all rows."""
    reference = Linear()
    for rank in range(2):
        for backward in range(num_backwards):
            (reference(rows(update, backward, rank)).sum() / reduced.num_tokens).backward()
    return max(relative_error(reduced.gradients[name], p.grad) for name, p in reference.named_parameters())


def around_the_owner():
    reduction = attach(Linear(), DDP2)
    return error_of(lambda: reduction.model(torch.ones(1, 4)))


def test_the_model_called_around_its_owner_is_an_error_at_once(ranks):
    for outcome in ranks(around_the_owner, 2):
        kind, text = outcome.value
        assert kind is UsageError
        assert "called around its owner" in text and "call the module that attach returned" in text


def changed(how, updates_before):
    model = Linear()
    if how == "unfrozen":
        model.late.weight.requires_grad_(False)
    reduction = attach(model, DDP2)
    for update in range(updates_before + 1):
        if update == updates_before and how == "added":
            model.extra = nn.Parameter(torch.ones(2))
        if update == updates_before and how == "unfrozen":
            model.late.weight.requires_grad_(True)
        if update == updates_before and how == "replaced":
            model.late.weight = nn.Parameter(model.late.weight.detach().clone())
        reduction.module(rows(update, 0, reduction.mesh.rank)).sum().backward()
        failed = error_of(lambda: reduction.finish(3))
        reduction.zero()
    return failed


SAYS = {"added": "extra: added", "unfrozen": "late.weight: unfrozen", "replaced": "late.weight: replaced"}


def every_change():
    return {(how, updates_before): changed(how, updates_before) for how in SAYS for updates_before in (0, 2)}


def test_a_parameter_the_wrapper_never_saw_is_an_error_at_once_or_later(ranks):
    for outcome in ranks(every_change, 2):
        for (how, _), (kind, text) in outcome.value.items():
            assert kind is LedgerError
            assert SAYS[how] in text and "attach" in text


def windows(plan, synced, updates):
    """Accumulate with `synced(backward, number)` outside of no_sync(); return each update's error, or what was raised."""
    reduction = attach(Linear(), plan)
    found = []

    def window(update):
        for backward in range(4):
            if synced == "all" or backward == {"last": 3, "first": 0}[synced]:
                reduction.module(rows(update, backward, reduction.mesh.rank)).sum().backward()
            else:
                with reduction.no_sync():
                    reduction.module(rows(update, backward, reduction.mesh.rank)).sum().backward()
        found.append(update_error(reduction.finish(12), update, 4))
        reduction.zero()

    for update in range(updates):
        failed = error_of(lambda update=update: window(update))
        if failed:
            return [*found, failed]
    return found


@pytest.mark.parametrize("synced", ["first", "all"])
def test_a_microbatch_after_the_one_that_reduced_is_an_error(ranks, synced):
    for outcome in ranks(windows, 2, OVERLAPS, synced, 1):
        ((kind, text),) = outcome.value
        assert kind is UsageError
        assert "run all but the last inside no_sync(), then finish()" in text


@pytest.mark.parametrize("synced", ["first", "all"])
def test_the_first_update_accumulates_so_it_is_exact_in_any_order(ranks, synced):
    for outcome in ranks(windows, 2, DDP2, synced, 2):
        exact, (kind, _) = outcome.value
        assert exact < 1e-6
        assert kind is UsageError


def test_the_right_order_is_exact_in_every_update(ranks):
    for outcome in ranks(windows, 2, DDP2, "last", 3):
        assert max(outcome.value) < 1e-6


def forward_outside(plan):
    """no_sync() around the backward only: DistributedDataParallel has decided in the forward."""
    reduction = attach(Linear(), plan)
    values = reduction.module(rows(0, 0, reduction.mesh.rank)).sum()
    with reduction.no_sync():
        values.backward()
    return error_of(lambda: reduction.module(rows(0, 1, reduction.mesh.rank)))


def test_no_sync_around_the_backward_only_is_an_error(ranks):
    for outcome in ranks(forward_outside, 2, OVERLAPS):
        kind, text = outcome.value
        assert kind is UsageError
        assert "inside no_sync()" in text


def nested():
    reduction = attach(Linear(), OVERLAPS)
    with reduction.no_sync():
        with reduction.no_sync():
            reduction.module(rows(0, 0, reduction.mesh.rank)).sum().backward()
        reduction.module(rows(0, 1, reduction.mesh.rank)).sum().backward()
    reduction.module(rows(0, 2, reduction.mesh.rank)).sum().backward()
    return update_error(reduction.finish(9), 0, 3)


def test_nested_no_sync_ends_with_the_outer_one(ranks):
    assert all(outcome.value < 1e-6 for outcome in ranks(nested, 2))


def without_zero():
    reduction = attach(Linear(), DDP2)
    reduction.module(rows(0, 0, reduction.mesh.rank)).sum().backward()
    reduction.finish(3)
    return error_of(lambda: reduction.module(rows(1, 0, reduction.mesh.rank)))


def test_an_update_that_starts_on_the_last_ones_gradients_is_an_error(ranks):
    for outcome in ranks(without_zero, 2):
        kind, text = outcome.value
        assert kind is UsageError
        assert "call zero() after the optimizer's step" in text


def other_order():
    model = Linear()
    if dist.get_rank() == 1:
        model.late.weight.requires_grad_(False)
    return error_of(lambda: attach(model, DDP2))


def test_ranks_that_would_wrap_other_parameters_are_refused_before_they_do(ranks):
    for outcome in ranks(other_order, 2):
        _, text = outcome.value
        assert "ranks prepared different things" in text and "late.weight" in text

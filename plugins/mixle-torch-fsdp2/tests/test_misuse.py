"""Loops that would train on wrong gradients or old parameters in silence: an error on every rank, or exact."""

from __future__ import annotations

from contextlib import nullcontext

import attrs
import torch
from torch import nn

from mixle_core import LedgerError, MixleError, ParallelPlan, UsageError, attach
from mixle_core.audit import assemble, relative_error

FSDP2 = ParallelPlan(dp_shard=2, timeout_s=10)
OVERLAPS = attrs.evolve(FSDP2, unused_parameters=False)
"""Reduces while the backward runs from the first update on; a plan of several backwards does so from the second on."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, values):
        for block in self.blocks:
            values = torch.tanh(block(values))
        return self.head(values) * getattr(self, "extra", 1.0)


def rows(update, backward, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * update + 10 * backward + rank))


def loss(module, update, backward, rank):
    return module(rows(update, backward, rank)).square().sum()


def error_of(call):
    try:
        call()
    except MixleError as error:
        return type(error), str(error)
    return None


def update_error(reduction, reduced, update, backwards, reference=None):
    """Worst error of the reduced gradients against one process on all rows."""
    reference = reference or Model()
    reference.zero_grad()
    for rank in range(2):
        for backward in backwards:
            (loss(reference, update, backward, rank) / reduced.num_tokens).backward()
    everyone = reduction.mesh.gather_objects(reduced.gradients)
    whole = {n: assemble(reduction.mesh.plan, reduction.table[n], [theirs[n] for theirs in everyone])[0] for n in reduced.gradients}
    return max(relative_error(whole[name], p.grad) for name, p in reference.named_parameters())


def windows(plan, synced, updates=3):
    """Accumulate 4 backwards, those in `synced` outside of no_sync(); each update's error and collectives, or what was raised."""
    reduction = attach(Model(), plan)
    found = []

    def window(update):
        for backward in range(4):
            with nullcontext() if backward in synced else reduction.no_sync():
                loss(reduction.module, update, backward, reduction.mesh.rank).backward()
        found.append(update_error(reduction, reduction.finish(12), update, range(4)))
        reduction.zero()

    for update in range(updates):
        failed = error_of(lambda update=update: window(update))
        if failed:
            return [*found, failed]
    return found


def orders():
    four = attrs.evolve(FSDP2, gradient_accumulation_steps=4)
    return {
        "right": windows(four, {3}),
        "flushed": windows(four, set()),
        "all": windows(OVERLAPS, {0, 1, 2, 3}),
        "two": windows(OVERLAPS, {2, 3}),
        "first": windows(OVERLAPS, {0}),
        "all, found out later": windows(four, {0, 1, 2, 3}),
        "first, found out later": windows(four, {0}),
    }


def test_backwards_that_reduce_in_the_middle_of_a_window_are_an_error_on_every_rank(ranks):
    """The first update accumulates whatever the loop says; so it is exact in any order."""
    for outcome in ranks(orders, 2):
        found = outcome.value
        assert max(found["right"]) < 1e-6 and len(found["right"]) == 3
        assert max(found["flushed"]) < 1e-6 and len(found["flushed"]) == 3
        for order, times in {"all": 4, "two": 2, "first": 2}.items():
            ((kind, text),) = found[order]
            assert kind is LedgerError
            assert f"head.weight: reduced {times} times by torch-fsdp2" in text
            assert "run every microbatch but the last inside no_sync()" in text
        for order in ("all, found out later", "first, found out later"):
            exact, (kind, _) = found[order]
            assert exact < 1e-6
            assert kind is LedgerError


def other_contexts():
    """no_sync() around the backward only, and nested: fully_shard decides in the backward."""
    errors = []
    for nested in (False, True):
        reduction = attach(Model(), OVERLAPS)
        for update in range(2):
            value = loss(reduction.module, update, 0, reduction.mesh.rank)
            with reduction.no_sync():
                if nested:
                    with reduction.no_sync():
                        pass
                value.backward()
            loss(reduction.module, update, 1, reduction.mesh.rank).backward()
            errors.append(update_error(reduction, reduction.finish(6), update, range(2)))
            reduction.zero()
    return errors


def test_no_sync_around_the_backward_only_and_nested_is_exact(ranks):
    assert all(max(outcome.value) < 1e-6 for outcome in ranks(other_contexts, 2))


def around_the_owner():
    reduction = attach(Model(), FSDP2)
    return error_of(lambda: reduction.model(torch.ones(1, 4))), error_of(lambda: reduction.module.module(torch.ones(1, 4)))


def test_the_inner_model_called_around_the_shell_is_an_error_at_once(ranks):
    for outcome in ranks(around_the_owner, 2):
        for kind, text in outcome.value:
            assert kind is UsageError
            assert "called around its owner" in text and "call the module that attach returned" in text


def changed(how):
    model = Model()
    if how == "unfrozen":
        model.head.weight.requires_grad_(False)
    reduction = attach(model, FSDP2)
    loss(reduction.module, 0, 0, reduction.mesh.rank).backward()
    reduction.finish(3)
    reduction.zero()
    if how == "added":
        model.extra = nn.Parameter(torch.ones(2))
    if how == "unfrozen":
        model.head.weight.requires_grad_(True)
    loss(reduction.module, 1, 0, reduction.mesh.rank).backward()
    return error_of(lambda: reduction.finish(3))


SAYS = {"added": "extra: added", "unfrozen": "head.weight: unfrozen"}


def every_change():
    return {how: changed(how) for how in SAYS}


def test_a_parameter_that_was_not_sharded_is_an_error(ranks):
    for outcome in ranks(every_change, 2):
        for how, (kind, text) in outcome.value.items():
            assert kind is LedgerError
            assert SAYS[how] in text and "attach" in text


def evaluated(when):
    """Train with evaluations (or a forward that is thrown away) between; errors against one process that steps as well."""
    reduction, reference = attach(Model(), attrs.evolve(FSDP2, gradient_accumulation_steps=2)), Model()
    ours, theirs = (torch.optim.SGD([p for _, p in m.named_parameters()], lr=0.5) for m in (reduction, reference))

    def evaluate(at):
        if at == when:
            with torch.no_grad() if when != "forward-thrown-away" else nullcontext():
                reduction.module(rows(9, 9, 0))

    errors = []
    for update in range(3):
        evaluate("forward-thrown-away")
        with reduction.no_sync():
            value = loss(reduction.module, update, 0, reduction.mesh.rank)
            evaluate("between-forward-and-backward")
            value.backward()
            evaluate("between-backwards")
        with reduction.no_sync() if update == 2 else nullcontext():
            loss(reduction.module, update, 1, reduction.mesh.rank).backward()
        evaluate("before-finish")
        reduced = reduction.finish(6)
        errors.append(update_error(reduction, reduced, update, range(2), reference))
        evaluate("before-step")
        ours.step()
        theirs.step()
        reduction.zero()
    return errors


MOMENTS = ["between-forward-and-backward", "between-backwards", "before-finish", "before-step", "forward-thrown-away"]


def evaluated_at_every_moment():
    return {when: evaluated(when) for when in MOMENTS}


def test_an_evaluation_changes_nothing_whenever_it_happens(ranks):
    """What the root keeps gathered after a forward must not outlive the step of the optimizer."""
    for outcome in ranks(evaluated_at_every_moment, 2):
        assert {when: errors for when, errors in outcome.value.items() if max(errors) > 1e-6} == {}

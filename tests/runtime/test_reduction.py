"""What the handle of an attached model refuses while training goes on, and what it leaves when it is closed."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.audit import relative_error
from mixle_core.testing import OwnsEverything, SumOwner, ToyLayout, next_token_loss, run_ranks, token_batch, toy_model

Plan = mx.ParallelPlan
OURS = {"toy": ToyLayout(), "double": OwnsEverything()}


def said(function):
    """Type name and text of what `function` raises."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 - the test judges what it is
        return type(error).__name__, str(error)
    return None, ""


def one_update(reduction, update=0):
    loss, tokens = next_token_loss(reduction.module, token_batch(update, 0, reduction.mesh.rank))
    loss.backward()
    return reduction.finish(tokens, float(loss.detach()))


def add(model):
    model.late = nn.Linear(2, 2)


def freeze(model):
    model.head.weight.requires_grad_(False)


def unfreeze(model):
    model.embed.weight.requires_grad_(True)


def replace(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def remove(model):
    model.norm.bias = None


CHANGES = {
    "add": r"2 parameters changed since attach \(late.bias: added; late.weight: added\); close\(\) and attach anew",
    "freeze": r"1 parameters changed since attach \(head.weight: frozen\)",
    "unfreeze": r"1 parameters changed since attach \(embed.weight: unfrozen\)",
    "replace": r"1 parameters changed since attach \(head.weight: replaced by another parameter\)",
    "remove": r"1 parameters changed since attach \(norm.bias: removed\)",
}


def change_one_rank(change, rank):
    model = toy_model()
    model.embed.weight.requires_grad_(False)
    reduction = mx.attach(model, Plan(dp_replicate=2), plugins=OURS)
    one_update(reduction)
    reduction.zero()
    if dist.get_rank() == rank:
        globals()[change](model)
    return said(lambda: one_update(reduction, 1))


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_parameter_that_changes_on_one_rank_is_an_error_on_all_at_that_update(change):
    """C21 b and c: nobody owns it, or its owner does not see it."""
    for rank, outcome in enumerate(run_ranks(change_one_rank, 2, change, 1, timeout_s=30)):
        error, text = outcome.value
        assert error == ("LedgerError" if rank == 1 else "UsageError")
        assert re.search(CHANGES[change], text)


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


class WrappingOwner(SumOwner):
    def install(self, model, rows, mesh):
        return Outer(super().install(model, rows, mesh))


class Wraps:
    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        owner = lambda: WrappingOwner(plan, layouts.transparent)
        return mx.Claim(owner=owner, parameters=layouts.trainable, axes={"dp_replicate"}, backend="double")


def call_around_the_wrapper():
    model = toy_model()
    reduction = mx.attach(model, Plan(dp_replicate=2), plugins={"wraps": Wraps()})
    ids = token_batch(0, 0, dist.get_rank())
    around = said(lambda: model(ids))
    with torch.no_grad():
        model(ids)
    broken = said(lambda: reduction.module(ids.float()))
    after_an_error = said(lambda: model(ids))
    return around, broken[0], after_an_error, one_update(reduction).norm()


def test_a_call_around_the_owner_is_caught_at_once():
    """C21 a. Without gradients the model may be called; an error inside the wrapper does not open the way around it."""
    outcomes = run_ranks(call_around_the_wrapper, 2, timeout_s=30)
    text = "the model was called around its owner, so nobody would reduce its gradients; call the module that attach returned"
    for outcome in outcomes:
        around, broken, after_an_error, norm = outcome.value
        assert around == after_an_error == ("UsageError", text)
        assert broken == "RuntimeError" and norm == outcomes[0].value[3] > 0


def test_gradients_that_were_not_dropped_are_caught_at_every_call_until_they_are():
    reduction = mx.attach(toy_model(), Plan(), plugins={})
    one_update(reduction)
    for _ in range(2):
        with pytest.raises(
            mx.UsageError, match=r"blocks\.0\.branch\.bias still holds the gradient of the last update \(22 do\); call zero\(\)"
        ):
            one_update(reduction, 1)
    reduction.zero()
    assert one_update(reduction, 1).skipped is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_clipping_leaves_gradients_alone_that_are_not_finite(value):
    reduction = mx.attach(toy_model(), Plan(), plugins={})
    loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, 0))
    (loss + reduction.module.norm.weight[3] * value).backward()
    before = {name: parameter.grad.clone() for name, parameter in reduction.named_parameters()}
    reduced = reduction.finish(tokens)
    assert not reduced.finite and reduced.nonfinite == ("norm.weight",) and reduced.clip_(1.0) == 1.0
    assert all(torch.equal(gradient, before[name]) or name == "norm.weight" for name, gradient in reduced.gradients.items())


def no_token_anywhere():
    reduction = mx.attach(toy_model(), Plan(dp_replicate=2), plugins=OURS)
    loss, tokens = next_token_loss(reduction.module, torch.zeros(2, 4, dtype=torch.long))
    loss.backward()
    reduced = reduction.finish(tokens)
    return reduced.skipped, reduced.num_tokens, reduced.loss, reduced.clip_(1.0)


def test_an_update_without_a_loss_token_on_any_rank_is_skipped():
    for outcome in run_ranks(no_token_anywhere, 2, timeout_s=30):
        assert outcome.value == ("no loss token on any rank", 0, 0.0, 1.0)


def attach_twice():
    model = toy_model()
    found = []
    for _ in range(3):
        reduction = mx.attach(model, Plan(dp_replicate=2), plugins=OURS)
        reduced = one_update(reduction)
        found.append({name: gradient.clone() for name, gradient in reduced.gradients.items()})
        reduction.zero()
        reduction.close()
    model(token_batch(0, 0, 0)).sum().backward()
    last = said(lambda: mx.attach(model, Plan(dp_replicate=2), plugins=OURS))[0]
    dist.barrier()
    return found, last


def test_a_model_can_be_attached_again_after_close():
    for outcome in run_ranks(attach_twice, 2, timeout_s=60):
        found, error = outcome.value
        assert error is None and len(found[0]) == 22
        assert all(relative_error(again[name], gradient) == 0.0 for again in found[1:] for name, gradient in found[0].items())


def groups_of_some_ranks():
    dist.new_group([0, 1])
    reduction = mx.attach(toy_model(), Plan(dp_replicate=3), plugins=OURS)
    return one_update(reduction).norm()


def test_a_group_that_only_some_ranks_are_in_does_not_disturb_attach():
    norms = [outcome.value for outcome in run_ranks(groups_of_some_ranks, 3, timeout_s=30)]
    assert norms[0] > 0 and norms == [norms[0]] * 3

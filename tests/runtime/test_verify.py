"""A verification finds what is wrong and names it; comparisons and the assembly of whole tensors from slices."""

import itertools
import math
from functools import partial

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.audit import UpdateReport, VerifyReport, assemble, relative_error, verify
from mixle_core.ownership import arbitrate
from mixle_core.testing import SumOwner, next_token_loss, run_ranks, tied_toy_model, token_batch, toy_model

Plan = mx.ParallelPlan
VICTIM = "blocks.1.gate_up.weight"


class Spoils(SumOwner):
    """Hands over a gradient that the ledger cannot tell from a right one."""

    def finish(self, observe):
        mine = self._parameters[VICTIM].grad.clone()
        result = super().finish(observe)
        self.spoil(result.gradients[VICTIM].tensor, mine)
        return result


class Scales(Spoils):
    def spoil(self, gradient, mine):
        gradient.mul_(2.0)


class Skips(Spoils):
    def spoil(self, gradient, mine):
        gradient.copy_(mine)


class Drifts(Spoils):
    def spoil(self, gradient, mine):
        gradient[0, 0] += 1e-6 * float(gradient.abs().max()) * dist.get_rank()


class WeighsTwice(SumOwner):
    def finish(self, observe):
        result = super().finish(observe)
        heavy = attrs.evolve(result.gradients[VICTIM], weight=1.0)
        return mx.OwnerReduction({**result.gradients, VICTIM: heavy}, result.counts)


class OwnsWith:
    def __init__(self, owner):
        self.owner = owner

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        owner = partial(globals()[self.owner], plan, layouts.transparent)
        return mx.Claim(owner=owner, parameters=layouts.trainable, axes={"dp_replicate"}, backend="double")


class FillsHead:
    @mx.hookimpl
    def init_params(self, model, layouts, seed):
        if "head.weight" not in layouts.parameters:
            return None
        torch.nn.init.normal_(model.weight, std=0.4, generator=torch.Generator().manual_seed(seed))
        return frozenset({"head.weight"})


class Nested(nn.Module):
    """Its layout hides the segment `inner`, so that logical names are those of the model inside."""

    def __init__(self):
        super().__init__()
        self.inner = toy_model()

    def forward(self, ids):
        return self.inner(ids)


class Hides:
    @mx.hookimpl
    def declare_layout(self, model):
        return mx.ModelLayout(axis="tp", transparent=("inner",)) if isinstance(model, Nested) else None


MODELS = {"toy": toy_model, "tied": tied_toy_model, "nested": Nested}


def test_a_build_that_draws_anew_at_each_call_is_refused():
    calls = itertools.count()

    def build():
        torch.manual_seed(next(calls))
        return nn.Linear(3, 2)

    text = (
        r"^two models of one build\(\) start with different values \(2 parameters, such as \w+\); expected the same at every call: seed it"
    )
    with pytest.raises(mx.UsageError, match=text):
        verify(build, Plan(), loss=lambda m, b: (m(b).square().sum(), 4), batch=lambda *_: torch.ones(4, 3), plugins={})


def report(owner, model="toy", options=None):
    plan = Plan(dp_replicate=2, gradient_accumulation_steps=2)
    plugins = {"owner": OwnsWith(owner), "fills": FillsHead(), "hides": Hides()}
    return verify(MODELS[model], plan, loss=next_token_loss, batch=token_batch, plugins=plugins, seed=2, **(options or {}))


@pytest.mark.parametrize("model", list(MODELS))
def test_a_right_owner_passes_with_plugins_that_fill_and_layouts_that_rename(model):
    options = {"windows": [2, 1, 2], "max_grad_norm": 0.05}
    for outcome in run_ranks(report, 2, "SumOwner", model, options, timeout_s=60):
        found = outcome.value
        assert found.passed(1e-5) and found.error < 1e-5
        assert [update.num_tokens for update in found.updates] == [56, 28, 56]
        assert found.collectives == {"owner": 1} and not any(update.skipped for update in found.updates)


@pytest.mark.parametrize(("owner", "error"), [("Scales", 1.0), ("Skips", None)])
def test_a_gradient_that_is_wrong_is_named(owner, error):
    for outcome in run_ranks(report, 2, owner, timeout_s=60):
        first = outcome.value.updates[0]
        assert not outcome.value.passed(1e-5) and first.worst_gradient == VICTIM and first.norm_error > 1e-3
        assert first.gradient_error == pytest.approx(error, rel=1e-4) if error else first.gradient_error > 0.1
        assert first.copies_equal == (owner == "Scales")
        assert first.loss_error < 1e-6 and outcome.value.updates[2].worst_parameter


def test_copies_that_differ_in_the_last_digits_do_not_pass_though_every_error_is_small():
    for outcome in run_ranks(report, 2, "Drifts", timeout_s=60):
        first = outcome.value.updates[0]
        assert not first.copies_equal and first.error < 1e-5 and not outcome.value.passed(1e-5)


def test_a_copy_that_counts_twice_in_the_norm_is_a_wrong_norm():
    for outcome in run_ranks(report, 2, "WeighsTwice", timeout_s=60):
        first = outcome.value.updates[0]
        assert first.gradient_error < 1e-6 and first.inf_norm_error < 1e-6
        assert first.norm_error > 1e-3 and not outcome.value.passed(1e-5)


def test_relative_error_of_tensors_that_are_missing_zero_or_of_another_shape():
    value, twice, zero = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]), torch.zeros(2)
    assert relative_error(None, None) == 0.0
    assert relative_error(value, None) == relative_error(None, value) == math.inf
    assert relative_error(value, value[:1]) == math.inf
    assert relative_error(twice, value) == 1.0 and relative_error(value, twice) == 0.5
    assert relative_error(value, zero) == 5.0 and relative_error(zero, zero) == 0.0
    assert relative_error(torch.tensor([math.nan, 4.0]), value) == math.inf
    assert relative_error(torch.tensor([1e30, 0.0]), torch.tensor([1e30, 1e22])) == pytest.approx(1e-8)
    assert relative_error(value.bfloat16(), value) == 0.0


def row(roles, stored=(), shape=(8, 6)):
    """A row of a table under dp_shard=2 x tp=2, as an owner that stores over `stored` gets it."""
    plan = Plan(dp_shard=2, tp=2)
    layout = mx.ParameterLayout("w", shape, "torch.float32", 4, trainable=True, roles=roles)
    layouts = mx.Layouts(parameters={"w": layout}, modules={}, units=())
    claim = mx.Claim(owner=object, parameters=["w"], axes={"dp_shard", "tp"}, backend="x", stored=stored)
    return plan, arbitrate(plan, layouts, [("x", claim)], [])[0]["w"]


def cut(tensor, role, number):
    pieces = [part.chunk(number, role.dim) for part in tensor.split(list(role.parts or (tensor.shape[role.dim],)), role.dim)]
    return [torch.cat([piece[i] for piece in pieces], role.dim) for i in range(number)]


WHOLE = torch.arange(48.0).view(8, 6)
ROLES = {
    "replica": mx.Replica("partial"),
    "rows": mx.Shard(0),
    "columns": mx.Shard(1),
    "fused rows": mx.Shard(0, parts=(2, 4, 2)),
    "fused columns": mx.Shard(1, parts=(4, 2)),
}


@pytest.mark.parametrize("stored", [(), ("dp_shard",)], ids=["whole-on-dp", "stored-on-dp"])
@pytest.mark.parametrize("role", list(ROLES))
def test_slices_of_all_ranks_make_the_whole_tensor(role, stored):
    plan, facts = row({"tp": ROLES[role]}, stored)
    on_tp = [WHOLE, WHOLE] if role == "replica" else cut(WHOLE, ROLES[role], 2)
    pieces = [on_tp[rank % 2].chunk(2)[rank // 2] if stored else on_tp[rank % 2] for rank in range(4)]
    whole, equal = assemble(plan, facts, pieces)
    assert equal and torch.equal(whole, WHOLE)


def test_shards_of_uneven_length_and_empty_ones_are_put_together():
    plan, facts = row({"tp": mx.Replica("complete")}, ("dp_shard",), shape=(3, 6))
    for first in (2, 3):
        pieces = [WHOLE[:first], WHOLE[:first], WHOLE[first:3], WHOLE[first:3]]
        assert torch.equal(assemble(plan, facts, pieces)[0], WHOLE[:3])


def test_copies_are_compared_to_the_bit_and_missing_ones_are_seen():
    plan, facts = row({"tp": mx.Shard(0)})
    top, bottom = WHOLE.chunk(2)
    assert assemble(plan, facts, [top, bottom, top, bottom + 1e-6])[1] is False
    assert torch.equal(assemble(plan, facts, [top, bottom, top * 2, bottom])[0], WHOLE)
    assert assemble(plan, facts, [None] * 4) == (None, True)
    assert assemble(plan, facts, [top, None, top, bottom]) == (None, False)


def test_a_window_longer_than_the_plan_says_still_ends_exactly():
    options = {"windows": [3, 2], "max_grad_norm": None}
    for outcome in run_ranks(report, 2, "SumOwner", "toy", options, timeout_s=60):
        assert outcome.value.passed(1e-5) and [update.num_tokens for update in outcome.value.updates] == [84, 56]


def test_a_report_without_a_loss_token_never_passes():
    nothing = UpdateReport(0.0, "w", 0.0, 0.0, 0.0, "w", True, 0, 0.0)
    assert not VerifyReport(Plan(), (nothing,), {}, {}).passed(1.0)

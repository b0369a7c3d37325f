"""Strict mode on every native owner: silent when all is right, and naming what a planted fault did at that very update."""

from __future__ import annotations

from functools import partial

import attrs
import pytest
import torch
import torch.distributed as dist

import mixle_core as mx
from mixle_core.audit import verify
from mixle_core.testing import OwnsEverything, SumOwner, ToyLayout, ToyLM, next_token_loss, run_ranks, token_batch, toy_model

Plan = mx.ParallelPlan
PLANS = {
    "ddp": Plan(dp_replicate=2, gradient_accumulation_steps=3),
    "fsdp2": Plan(dp_shard=2, gradient_accumulation_steps=3),
    "tp": Plan(tp=2, gradient_accumulation_steps=3),
    "hsdp": Plan(dp_replicate=2, dp_shard=2, gradient_accumulation_steps=2),
    "ddp x tp": Plan(dp_replicate=2, tp=2, gradient_accumulation_steps=2),
    "fsdp2 x tp, sequence parallel": Plan(dp_shard=2, tp=2, sequence_parallel=True, gradient_accumulation_steps=2),
}


class Twice(ToyLM):
    """Every block is called twice by one forward: a unit of fully_shard reduces in two terms."""

    def forward(self, ids, use_branch=True):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(block(hidden, use_branch), use_branch)
        return self.head(self.norm(hidden))


def twice_model():
    with torch.device("meta"):
        return Twice(blocks=3)


def clean(name: str, unused: bool):
    plan = PLANS[name]
    plan = attrs.evolve(plan, unused_parameters=unused or None)
    build = toy_model if plan.tp > 1 else twice_model
    windows = [plan.num_backwards, 1, plan.num_backwards, plan.num_backwards]

    def batch(update, backward, data_rank):
        ids = token_batch(update, backward, data_rank)
        # the branch of the last update goes unused on one data rank, that of the third on all
        return {"ids": ids, "use_branch": update != 2 and not (update == 3 and data_rank)} if unused else ids

    return verify(
        build, plan, loss=next_token_loss, batch=batch, windows=windows, strict=True, plugins=_plugins(plan), max_grad_norm=0.5
    ).error


def _plugins(plan):
    return {"toy": ToyLayout()} if plan.tp > 1 else None


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_no_alarm_where_all_is_right(name, unused):
    if unused and "sequence" in name:
        unused = False
    for outcome in run_ranks(clean, PLANS[name].world_size, name, unused, reuse=True):
        assert outcome.value <= 1e-5


# ---- planted faults: nothing before the second update, the fault within it ----


def trained(name: str, spoil: str, start: str = "inside"):
    """Two updates; at the second `spoil` does its work. What each ended with."""
    plan = PLANS[name]
    reduction = mx.attach(toy_model(), plan, plugins=_plugins(plan), strict=True)
    said = []
    for update in range(2):
        try:
            if update == 1:
                globals()[spoil](reduction)
            rows = [token_batch(update, n, data_rank(plan)) for n in range(plan.num_backwards)]
            loss_sum, tokens = reduction.run(rows, next_token_loss)
            if update == 1 and start == "after the backward":
                globals()[spoil + "_late"](reduction)
            reduction.finish(tokens, float(loss_sum))
            said.append("fine")
        except mx.MixleError as error:
            said.append(f"{type(error).__name__}: {error}")
        reduction.zero()
    reduction.close()
    return said


def data_rank(plan):
    at = plan.coordinates(dist.get_rank())
    return at["dp_replicate"] * plan.dp_shard + at["dp_shard"]


def victim(reduction):
    return dict(reduction.named_parameters())["norm.weight"]


def second_hook(reduction):
    victim(reduction).register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))


def by_hand(reduction):
    """Nothing before the backward."""


def by_hand_late(reduction):
    gradient = victim(reduction).grad
    dist.all_reduce(gradient.to_local() if hasattr(gradient, "to_local") else gradient)


def through_a_copy(reduction):
    """Nothing before the backward."""


def through_a_copy_late(reduction):
    """All gradients flattened, summed, and written back: what hand-written loops do."""
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for _, p in reduction.named_parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(piece.view_as(gradient))


def parameter_added(reduction):
    reduction.model.late = torch.nn.Parameter(torch.zeros(3))


def around_the_wrapper(reduction):
    reduction.model(token_batch(1, 0, 0))


@pytest.mark.parametrize("name", ["ddp", "tp", "ddp x tp"])
def test_a_second_hook_on_a_gradient_is_named(name):
    for outcome in run_ranks(trained, PLANS[name].world_size, name, "second_hook"):
        first, second = outcome.value
        assert first == "fine"
        assert second.startswith("LedgerError: update 1: ") and "norm.weight: a gradient hook was put on it since attach" in second
        assert "norm.weight: allreduce over group" in second and "wrote over the gradient, beside" in second
        assert second.endswith("or report the owner's fault to its plugin")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp"])
def test_a_collective_by_hand_on_a_finished_gradient_is_named(name):
    for outcome in run_ranks(trained, 2, name, "by_hand", "after the backward"):
        first, second = outcome.value
        assert first == "fine" and "norm.weight: allreduce over group" in second and "gradient hook" not in second


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp"])
def test_a_reduction_by_hand_through_a_copy_of_all_gradients_is_named(name):
    for outcome in run_ranks(trained, 2, name, "through_a_copy", "after the backward"):
        first, second = outcome.value
        assert first == "fine" and "all gradients: allreduce over group" in second and "a reduction by hand, of a copy" in second


def after_finish():
    reduction = mx.attach(toy_model(), Plan(dp_replicate=2), strict=True)
    loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, dist.get_rank()))
    loss.backward()
    reduction.finish(tokens)
    dist.all_reduce(victim(reduction).grad)
    try:
        reduction.zero()
    except mx.LedgerError as error:
        left = [name for name, p in reduction.named_parameters() if p.grad is not None]
        reduction.close()
        return str(error), left
    return "fine", []


def test_a_collective_between_finish_and_zero_is_named_at_that_update():
    for outcome in run_ranks(after_finish, 2, reuse=True):
        said, left = outcome.value
        assert said.startswith("update 0: 1 collectives on gradients after finish(), whose result the optimizer stepped with: norm.weight")
        assert left == []


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tp"])
def test_a_parameter_added_after_preparation_is_named(name):
    for outcome in run_ranks(trained, 2, name, "parameter_added"):
        assert outcome.value[0] == "fine" and "late: added" in outcome.value[1]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_forward_around_the_wrapper_is_refused(name):
    for outcome in run_ranks(trained, 2, name, "around_the_wrapper"):
        assert outcome.value[0] == "fine" and "the model was called around its owner" in outcome.value[1]


class SendsNothing:
    """torch.distributed for one module, whose all_reduce leaves what it gets as it is."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_reduce(self, values, group=None, async_op=False):
        future = torch.futures.Future()
        future.set_result([values])
        self.get_future = lambda: future
        return self


def ddp_bucket_stays_here(reduction):
    from mixle_torch_ddp import reduction as module

    module.dist = SendsNothing()


def fsdp2_flush_skipped(reduction):
    owner = reduction._owners["torch-fsdp2"]
    owner._usage.varies = True
    owner._set_sync()
    owner._flush = lambda unused: None


def fsdp2_flush_skipped_and_counted(reduction):
    fsdp2_flush_skipped(reduction)
    owner = reduction._owners["torch-fsdp2"]
    owner._flush = lambda unused: [counting.backwards.add(owner._forwards) for _, counting, _ in owner._units]


def fsdp2_scatter_stays_here(reduction):
    from mixle_torch_fsdp2 import reduction as module

    def stays(output, values, group, op, async_op=False):
        output.copy_(values.chunk(2)[dist.get_rank()])

    module.reduce_scatter = stays


def tp_sum_forgotten(reduction):
    reduction._owners["dtensor-tp"]._group = None


def tp_sum_elsewhere(reduction):
    reduction._owners["dtensor-tp"]._group = reduction.mesh.group(("tp",), "other")


def test_a_bucket_of_ddp_that_is_not_sent_is_named():
    for outcome in run_ranks(trained, 2, "ddp", "ddp_bucket_stays_here"):
        first, second = outcome.value
        assert first == "fine" and "torch-ddp announced" in second and "over dp_replicate, and no such call was made" in second
        assert "blocks.0.branch" in second or "norm.bias" in second


@pytest.mark.parametrize("spoil", ["fsdp2_flush_skipped", "fsdp2_flush_skipped_and_counted"])
def test_a_skipped_flush_of_fsdp2_is_an_error_also_where_it_looks_like_disuse(spoil):
    for outcome in run_ranks(trained, 2, "fsdp2", spoil):
        first, second = outcome.value
        assert first == "fine" and "torch-fsdp2 handed over no gradient for blocks.0.branch.bias (22 in all), which was used" in second


def test_a_unit_of_fsdp2_that_says_it_was_reduced_and_was_not_is_named():
    for outcome in run_ranks(trained, 2, "fsdp2", "fsdp2_scatter_stays_here"):
        first, second = outcome.value
        assert first == "fine" and "torch-fsdp2 announced" in second and "over dp_shard, and no such call was made" in second


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            "tp_sum_forgotten",
            "blocks.0.down.bias, blocks.0.head_scale.weight, blocks.1.down.bias and 1 more: not reduced over tp by dtensor-tp",
        ),
        ("tp_sum_elsewhere", "dtensor-tp announced"),
    ],
)
def test_a_sum_over_tp_that_is_forgotten_or_goes_over_another_group_is_named(spoil, text):
    for outcome in run_ranks(trained, 2, "tp", spoil):
        assert outcome.value[0] == "fine" and text in outcome.value[1]


class OnTheWrongGroup(SumOwner):
    """Sums over tp what it announces for dp_replicate."""

    def install(self, model, rows, mesh):
        installed = super().install(model, rows, mesh)
        wrong = mesh.group(("tp",), rows[0].owner)
        self._groups = dict.fromkeys(self._groups, wrong)
        return installed


class HalfTheGradient(SumOwner):
    """Says of half of the bytes that they are the whole."""

    def finish(self, observe):
        announce = self._mesh.announce
        self._mesh.announce = lambda who, axes, names, size, **more: announce(who, axes, names, size // 2, **more)
        try:
            return super().finish(observe)
        finally:
            self._mesh.announce = announce


class Mute(SumOwner):
    announces = False


class Owns(OwnsEverything):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        claim = super().own_reduction(plan, layouts)
        return mx.Claim(
            owner=partial(self.kind, plan, layouts.transparent), parameters=claim.parameters, axes=claim.axes, backend="double", whole=False
        )


class RunsTP:
    """The real executor, without its plugin's claim for gradients."""

    @mx.hookimpl
    def own_axis(self, plan, layouts):
        from mixle_dtensor_tp.plugin import own_axis

        return own_axis(plan, layouts)


def owned(kind, plan):
    reduction = None
    try:
        plugins = {"owns": Owns(globals()[kind])}
        if plan.tp > 1:
            plugins |= {"toy": ToyLayout(), "runs": RunsTP()}
        reduction = mx.attach(toy_model(), plan, plugins=mx.load_plugins([], extra=plugins), strict=True)
        loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, dist.get_rank()))
        loss.backward()
        reduction.finish(tokens)
    except mx.MixleError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if reduction is not None:
            reduction.close()
    return "fine"


def test_a_collective_on_the_wrong_group_is_named_with_both_groups():
    for outcome in run_ranks(owned, 4, "OnTheWrongGroup", Plan(dp_replicate=2, tp=2)):
        assert "and no such call was made" in outcome.value and "owns over tp that it did not announce" in outcome.value


def test_bytes_that_are_not_those_of_the_gradients():
    for outcome in run_ranks(owned, 2, "HalfTheGradient", Plan(dp_replicate=2), reuse=True):
        assert "bytes handed over for" in outcome.value and "bytes of gradients by owns" in outcome.value


def test_an_owner_that_announces_nothing_is_refused_under_strict():
    for outcome in run_ranks(owned, 2, "Mute", Plan(dp_replicate=2), reuse=True):
        assert outcome.value.startswith(
            "CapabilityError: strict: owns does not announce its collectives (Mesh.announce), so they cannot be compared with the table;"
        )


def two_models():
    """Two strict models and one that is not train side by side; the calls of one are not counted for the others."""
    plan = Plan(dp_replicate=2)
    both = [mx.attach(toy_model(), plan, strict=strict) for strict in (True, True, False)]
    for update in range(2):
        for reduction in both:
            loss, _ = next_token_loss(reduction.module, token_batch(update, 0, dist.get_rank()))
            loss.backward()
        for reduction in both:
            reduction.finish(1)
            reduction.zero()
    for reduction in both:
        reduction.close()
    return True


def test_several_models_of_one_process_are_kept_apart():
    assert all(outcome.value for outcome in run_ranks(two_models, 2, reuse=True))

"""Who runs the microbatches of a batch, the core or the schedule of an executor, and who builds the optimizer."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import mixle_core as mx
from mixle_core.runtime.optimizers import build_optimizers
from mixle_core.testing import run_ranks

Plan = mx.ParallelPlan
SGD = partial(torch.optim.SGD, lr=0.5)


class Pair(nn.Module):
    """Two weights; `seen` has what it was called with."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.b = nn.Parameter(torch.tensor([3.0]))
        self.seen = []

    def forward(self, rows):
        self.seen.append(rows)
        terms = [rows @ self.a if self.a is not None else 0.0, rows.sum() * self.b if self.b is not None else 0.0]
        return (terms[0] + terms[1]).square()


def loss_of(module, rows):
    return module(rows).sum(), len(rows)


def microbatches(number=3, data_rank=0):
    generator = torch.Generator().manual_seed(data_rank)
    return [torch.randn(2 + i, 2, generator=generator) for i in range(number)]


class Watches:
    """Owner of what is final: notes for each gradient of `a` or `b` how many `no_sync()` are open."""

    made = None

    def __init__(self, layouts):
        self.open, self.depths, Watches.made = 0, [], self

    def install(self, model, rows, mesh):
        self.rows = {row.name: row for row in rows}
        self.parameters = {row.name: model.get_parameter(row.name) for row in rows}
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda _: self.depths.append(self.open))
        return model

    @contextmanager
    def no_sync(self):
        self.open += 1
        yield
        self.open -= 1

    def finish(self, observe):
        gradients = {name: mx.Gradient(parameter.grad, 1.0) for name, parameter in self.parameters.items()}
        return mx.OwnerReduction(gradients, dict.fromkeys(gradients, 1))

    def zero(self):
        for parameter in self.parameters.values():
            parameter.grad = None

    def close(self):
        self.parameters = {}


class Owns:
    """Claims final gradients: an owner for each group of names."""

    def __init__(self, *owners):
        self.owners = owners

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        axes = {"pp", "tp", "dp_replicate"}
        return tuple(
            mx.Claim(owner=partial(owner, layouts), parameters=names, axes=axes, backend="double", final=True)
            for owner, names in self.owners
        )


def watched():
    reduction = mx.attach(Pair(), Plan(), plugins={"owns": Owns((Watches, ["a", "b"]))})
    return reduction, Watches.made


@pytest.mark.parametrize(("last", "depths"), [(True, [1, 1, 1, 1, 0, 0]), (False, [1] * 6)])
def test_without_a_schedule_a_batch_is_the_loop_that_one_writes_by_hand(last, depths):
    """The same bits, and `no_sync()` around every microbatch but the last of the update."""
    by_hand, total = Pair(), 0.0
    for rows in microbatches():
        loss = loss_of(by_hand, rows)[0]
        (loss * 0.25).backward()
        total += float(loss.detach())
    reduction, owner = watched()
    loss_sum, tokens = reduction.run(microbatches(), loss_of, loss_scale=0.25, last=last)
    assert loss_sum.dtype == torch.float64 and loss_sum.shape == () and not loss_sum.requires_grad
    assert (float(loss_sum), tokens) == (total, 2 + 3 + 4)
    assert owner.depths == depths and owner.open == 0
    assert torch.equal(reduction.model.a.grad, by_hand.a.grad) and torch.equal(reduction.model.b.grad, by_hand.b.grad)
    reduced = reduction.finish(tokens, float(loss_sum), loss_scale=0.25)
    assert reduced.loss == pytest.approx(total / 9)
    assert torch.allclose(reduced.gradients["a"], by_hand.a.grad / (9 * 0.25))


def test_without_gradients_a_batch_is_its_forwards():
    reduction, owner = watched()
    with torch.no_grad():
        loss_sum, tokens = reduction.run(microbatches(), loss_of)
        wanted = sum(loss_of(Pair(), rows)[0].double() for rows in microbatches())
    assert torch.equal(loss_sum, wanted) and tokens == 9
    assert [len(rows) for rows in reduction.model.seen] == [2, 3, 4]
    assert owner.depths == [] and reduction.model.a.grad is None


def test_a_batch_without_microbatches_has_no_loss_and_no_tokens():
    reduction, owner = watched()
    loss_sum, tokens = reduction.run([], loss_of)
    assert (float(loss_sum), tokens, owner.depths) == (0.0, 0, [])


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda module, rows: (module(rows).detach().sum(), 1), r"loss returned a tensor of shape \[\]: expected a summed scalar with a"),
        (lambda module, rows: (module(rows), 1), r"loss returned a tensor of shape \[2\]: expected a summed scalar with a gradient"),
        (lambda module, rows: module(rows).sum(), r"loss returned a Tensor; expected \(summed loss, number of loss tokens\)"),
        (lambda module, rows: (module(rows).sum(), 1.5), r"loss returned 1.5 as the number of loss tokens; expected a whole number"),
    ],
    ids=["detached", "no-scalar", "no-count", "half-a-token"],
)
def test_what_is_no_loss_is_refused_in_a_batch(loss, text):
    reduction, _ = watched()
    with pytest.raises(mx.UsageError, match=text):
        reduction.run(microbatches(), loss)


def test_a_loss_without_a_gradient_is_one_when_nobody_asks_for_gradients():
    reduction, _ = watched()
    with torch.no_grad():
        loss_sum, _ = reduction.run(microbatches(), lambda module, rows: (module(rows).detach().sum(), 1))
    assert float(loss_sum) > 0.0


class Stages:
    """Executes pp without sending anything: stage 0 has `a` and no loss, stage 1 has `b` and the loss."""

    made = 0

    def __init__(self):
        Stages.made += 1
        self.applied = 0

    def shard(self, layout, tensor, mesh):
        return tensor

    def apply(self, model, layouts, mesh):
        self.applied += 1
        self.stage = mesh.coordinates["pp"]
        setattr(model, "ba"[self.stage], None)

    def run(self, module, microbatches, forward, loss_scale):
        self.returned = []
        for rows in microbatches:
            if self.stage == 0:
                module(rows)
                continue
            loss = forward(module, rows)
            self.returned.append(loss.detach())
            if torch.is_grad_enabled():
                (loss * loss_scale).backward()


class Boundaries:
    """Executes an axis without a schedule."""

    def shard(self, layout, tensor, mesh):
        return tensor

    def apply(self, model, layouts, mesh):
        pass


class SecondSchedule(Stages):
    """Another executor that brings one."""

    def apply(self, model, layouts, mesh):
        self.applied += 1


class Executes:
    """Declares `a` on the first and `b` on the last stage, both whole on tp; `by_axis` executes."""

    def __init__(self, **by_axis):
        self.by_axis = by_axis

    @mx.hookimpl
    def declare_layout(self, model, plan):
        stages = {"a": mx.Replica(ranks=(0,)), "b": mx.Replica(ranks=(1,))}
        whole = mx.ModelLayout(axis="tp", modules={"": mx.ModuleLayout(parameters={"*": mx.Replica("complete")})})
        return (mx.ModelLayout(axis="pp", modules={"": mx.ModuleLayout(parameters=stages)}), whole)

    @mx.hookimpl
    def own_axis(self, plan, layouts):
        return tuple(mx.AxisClaim(axis=axis, executor=globals()[name], backend="double") for axis, name in self.by_axis.items())


def scheduled(grad):
    plan = Plan(pp=2, dp_replicate=2, microbatches=3)
    plugins = {"executes": Executes(pp="Stages"), "owns": Owns((Watches, ["a", "b"]))}
    reduction = mx.attach(Pair(), plan, plugins=plugins)
    data_rank, owner = reduction.mesh.coordinates["dp_replicate"], Watches.made
    executor = reduction._schedule.__self__
    with nullcontext() if grad else torch.no_grad():
        loss_sum, tokens = reduction.run(microbatches(3, data_rank), loss_of, loss_scale=0.5)
    gradient = {name: None if p.grad is None else p.grad.clone() for name, p in reduction.named_parameters()}
    return float(loss_sum), tokens, owner.depths, executor.returned, len(reduction.model.seen), gradient


@pytest.mark.parametrize("grad", [True, False], ids=["training", "no-grad"])
def test_a_schedule_runs_inside_no_sync_and_every_stage_learns_the_loss_of_its_data_rank(grad):
    for outcome in run_ranks(scheduled, 4, grad, timeout_s=60):
        loss_sum, tokens, depths, returned, calls, gradient = outcome.value
        stage, data_rank = divmod(outcome.rank, 2)
        model = Pair()
        model.a = None
        losses = [loss_of(model, rows)[0] for rows in microbatches(3, data_rank)]
        assert loss_sum == pytest.approx(float(sum(loss.detach().double() for loss in losses)), rel=1e-12)
        assert tokens == 9 and calls == 3
        assert list(gradient) == ["ab"[stage]]
        assert [float(value) for value in returned] == ([float(loss.detach()) for loss in losses] if stage else [])
        if stage and grad:
            sum(loss * 0.5 for loss in losses).backward()
            assert depths == [1, 1, 1] and torch.allclose(gradient["b"], model.b.grad)
        else:
            assert depths == [] and gradient["ab"[stage]] is None


def executed(by_axis):
    plugins = {"executes": Executes(**by_axis), "owns": Owns((Watches, ["a", "b"]))}
    reduction = mx.attach(Pair(), Plan(pp=2, tp=2), plugins=plugins)
    executor = reduction._schedule.__self__
    return Stages.made, type(executor).__name__, executor.applied, reduction.table.executors


def test_axes_claimed_with_one_factory_are_executed_by_one_object():
    for outcome in run_ranks(executed, 4, {"pp": "Stages", "tp": "Stages"}, timeout_s=60):
        assert outcome.value[1:] == ("Stages", 1, {"pp": "executes", "tp": "executes"})


def test_a_factory_of_several_axes_is_called_once():
    for outcome in run_ranks(executed, 4, {"pp": "Stages", "tp": "Stages"}, timeout_s=60):
        assert outcome.value[0] == 1


def test_the_schedule_is_that_of_the_only_executor_that_has_one():
    for outcome in run_ranks(executed, 4, {"tp": "Boundaries", "pp": "Stages"}, timeout_s=60):
        assert outcome.value == (1, "Stages", 1, {"pp": "executes", "tp": "executes"})


def test_two_executors_with_schedules_are_refused_on_every_rank():
    text = "two executors bring a schedule of microbatches; way out: execute all axes with plugins of one backend"
    for outcome in run_ranks(executed, 4, {"pp": "Stages", "tp": "SecondSchedule"}, timeout_s=60, check=False):
        assert (outcome.error, outcome.message) == ("CapabilityError", text)


class Stepped(torch.optim.SGD):
    """What an owner built."""


class Builds(Watches):
    """Steps its parameters itself."""

    asked = None

    def build_optimizer(self, factory, names):
        Builds.asked = list(names)
        inner = factory([self.parameters[name] for name in names])
        return Stepped(inner.param_groups[0]["params"], lr=inner.defaults["lr"])


class Frozen(Pair):
    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.ones(1), requires_grad=False)


def attached(*owners):
    return mx.attach(Frozen(), Plan(), plugins={"owns": Owns(*owners)})


def held_by(optimizer):
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def test_an_optimizer_is_over_the_trainable_parameters_or_those_that_are_named():
    reduction = attached((Watches, ["a", "b"]))
    model = reduction.model
    everything = reduction.build_optimizer(SGD)
    assert type(everything) is torch.optim.SGD and held_by(everything) == [id(model.a), id(model.b)]
    assert held_by(reduction.build_optimizer(SGD, ["b"])) == [id(model.b)]
    assert held_by(reduction.build_optimizer(SGD, ["c", "b", "nowhere"])) == [id(model.b)]


def test_without_a_parameter_there_is_no_optimizer_and_the_factory_is_not_called():
    reduction = attached((Watches, ["a", "b"]))
    for names in ([], ["c"], ["elsewhere"]):
        assert reduction.build_optimizer(lambda parameters: pytest.fail("nothing to step"), names) is None


def test_an_owner_that_steps_its_parameters_itself_builds_their_optimizer():
    reduction = attached((Builds, ["a", "b"]))
    built = reduction.build_optimizer(SGD)
    assert type(built) is Stepped and Builds.asked == ["a", "b"] and built.defaults["lr"] == 0.5
    assert held_by(reduction.build_optimizer(SGD, {"b"})) == [id(reduction.model.b)] and Builds.asked == ["b"]


def test_an_owner_is_not_asked_about_parameters_of_another():
    reduction = attached((Builds, ["a"]), (Watches, ["b"]))
    Builds.asked = None
    assert type(reduction.build_optimizer(SGD, ["b"])) is torch.optim.SGD and Builds.asked is None
    assert type(reduction.build_optimizer(SGD, ["a"])) is Stepped


def test_routes_are_built_each_by_the_owner_of_its_parameters():
    reduction = attached((Builds, ["a"]), (Watches, ["b"]))
    built = build_optimizers({"a": SGD, "b": SGD}, reduction.table, reduction.build_optimizer)
    assert {pattern: type(optimizer).__name__ for pattern, optimizer in built.items()} == {"a": "Stepped", "b": "SGD"}


def test_a_session_steps_the_optimizer_of_the_owner():
    session = mx.prepare(Pair(), Plan(), loss=loss_of, optimizer=SGD, plugins={"owns": Owns((Builds, ["a", "b"]))})
    before = session.reduction.model.a.detach().clone()
    receipt = session.train_batch(microbatches()[0])
    assert type(session.optimizers["**"]) is Stepped and receipt.learning_rate == 0.5
    assert not torch.equal(before, session.reduction.model.a)


def test_names_may_be_any_iterable():
    reduction = attached((Watches, ["a", "b"]))
    assert held_by(reduction.build_optimizer(SGD, iter(["a", "b"]))) == [id(reduction.model.a), id(reduction.model.b)]


def test_an_owner_that_steps_itself_and_has_only_some_of_the_names_is_refused():
    reduction = attached((Builds, ["a"]), (Watches, ["b"]))
    with pytest.raises(mx.CapabilityError):
        reduction.build_optimizer(SGD)

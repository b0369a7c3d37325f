"""A declaration is a prediction: what the first gradients contradict is an error on every rank, and what they confirm costs no more."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.audit import relative_error
from mixle_core.runtime import counted_traffic
from mixle_core.testing import OwnsEverything, SumOwner, run_ranks

Plan = mx.ParallelPlan
WIDTH, HEADS, SIZE = 6, 4, 3


class CopyIn(torch.autograd.Function):
    """Enters the part in which each rank computes its own heads: the gradient is a sum over them."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOut(torch.autograd.Function):
    """Leaves it: the outputs of all heads add up, and all ranks go on alike."""

    @staticmethod
    def forward(ctx, values, group):
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mixer(nn.Module):
    """norm and bias are computed alike on all ranks, up and down by head; all heads share one scale."""

    group = None

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"norm": (WIDTH,), "up": (HEADS * SIZE, WIDTH), "scale": (SIZE,), "down": (WIDTH, HEADS * SIZE), "bias": (WIDTH,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, rows, use=1.0):
        hidden = rows * self.norm
        inner = hidden if self.group is None else CopyIn.apply(hidden, self.group)
        inner = ((inner @ self.up.T).tanh().unflatten(-1, (-1, SIZE)) * (self.scale * use)).flatten(-2)
        out = inner @ self.down.T
        return (out if self.group is None else SumOut.apply(out, self.group)) + self.bias * use


class ByHead:
    """Cuts up and down, and gives the model the group over which its heads are spread."""

    def shard(self, layout, tensor, mesh):
        role = layout.roles["tp"]
        return tensor.chunk(mesh.plan.tp, role.dim)[mesh.coordinates["tp"]].clone() if isinstance(role, mx.Shard) else tensor

    def apply(self, model, layouts, mesh):
        model.group = mesh.group(("tp",), "forward")


RIGHT = {"norm": "complete", "scale": "partial", "bias": "complete"}


class MixerPlugin:
    def __init__(self, roles):
        self.roles = {name: mx.Replica(gradient) for name, gradient in {**RIGHT, **roles}.items()}

    @mx.hookimpl
    def declare_layout(self, model, plan):
        roles = {**self.roles, "up": mx.Shard(0, unit=SIZE), "down": mx.Shard(1, unit=SIZE)}
        return mx.ModelLayout(axis="tp", modules={"": mx.ModuleLayout(parameters=roles)})

    @mx.hookimpl
    def own_axis(self, plan, layouts):
        return mx.AxisClaim(axis="tp", executor=ByHead, backend="double")


class Hides(SumOwner):
    def finish(self, observe):
        return super().finish(lambda gradients: None)


class HidesEverything(OwnsEverything):
    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        return mx.Claim(
            owner=lambda: Hides(plan, layouts.transparent), parameters=layouts.trainable, axes={"tp"}, backend="double", whole=False
        )


def rows_of(update, data_rank):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * update + data_rank))


def train(plan, roles, uses, owner="OwnsEverything"):
    """One update for each of `uses`; per update what went wrong, or gradients, and the control collectives of it."""
    double = {"OwnsEverything": OwnsEverything, "HidesEverything": HidesEverything}[owner]()
    reduction = mx.attach(Mixer(), plan, plugins={"mixer": MixerPlugin(roles), "double": double})
    at = reduction.mesh.coordinates["dp_replicate"]
    trail = []
    for update, use in enumerate(uses):
        before = counted_traffic("mixle:control:")
        loss = reduction.module(rows_of(update, at), use).square().sum()
        loss.backward()
        try:
            found = {name: gradient.clone() for name, gradient in reduction.finish(5).gradients.items()}
        except mx.MixleError as error:
            found = (type(error).__name__, str(error))
            left = [name for name, parameter in reduction.named_parameters() if parameter.grad is not None]
            assert left == [], "an update that is given up leaves no gradient behind"
        reduction.zero()
        after = counted_traffic("mixle:control:")
        calls = {key: t.num_collectives - (before[key].num_collectives if key in before else 0) for key, t in after.items()}
        trail.append((found, {key: number for key, number in calls.items() if number}))
    return trail


SAYS = "1 declarations are contradicted by the first gradients: "


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp_replicate=2, tp=2)], ids=["tp2", "dp2xtp2"])
@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ({"scale": "complete"}, SAYS + "scale on tp: declared Replica(complete), but the ranks' gradients differ by "),
        ({"bias": "partial"}, SAYS + "bias on tp: declared Replica(partial), but all ranks computed the same gradient (norms "),
        ({"norm": "partial"}, SAYS + "norm on tp: declared Replica(partial), but all ranks computed the same gradient (norms "),
    ],
    ids=["partial-as-complete", "complete-as-partial", "complete-behind-the-heads-as-partial"],
)
def test_a_wrong_declaration_is_an_error_on_every_rank_at_every_update_until_it_is_corrected(plan, roles, text):
    for outcome in run_ranks(train, plan.world_size, plan, roles, [1.0, 1.0], timeout_s=60):
        for found, _ in outcome.value:
            assert found[0] == "DeclarationError" and found[1].startswith(text)
            assert found[1].endswith("ranks of the axis got different rows. `mixle verify` decides")


def test_both_numbers_of_both_ranks_stand_in_the_text():
    """The norms that the ranks saw, as one process computes them for each half of the heads."""
    model = Mixer()
    norms = []
    for half in (slice(0, 2), slice(2, 4)):
        rows = rows_of(0, 0)
        inner = ((rows * model.norm) @ model.up.T).tanh().unflatten(-1, (-1, SIZE))
        out = (inner * model.scale).flatten(-2) @ model.down.T + model.bias
        shared = (inner[:, half] * model.scale).flatten(-2) @ model.down[:, half.start * SIZE : half.stop * SIZE].T
        (gradient,) = torch.autograd.grad(shared, model.scale, grad_outputs=2 * out.detach())
        norms.append(f"{float(gradient.norm()):.4g}")
    for outcome in run_ranks(train, 2, Plan(tp=2), {"scale": "complete"}, [1.0], timeout_s=60):
        assert f"(norms {norms[0]}, {norms[1]})" in outcome.value[0][0][1]


def test_several_wrong_declarations_are_named_together():
    for outcome in run_ranks(train, 2, Plan(tp=2), {"scale": "complete", "bias": "partial"}, [1.0], timeout_s=60):
        lines = outcome.value[0][0][1].splitlines()
        assert (
            lines[0].startswith("2 declarations are contradicted")
            and lines[1].startswith("  bias on tp")
            and lines[2].startswith("  scale on tp")
        )


def test_all_zero_gradients_are_undecided_and_decided_at_the_next_update():
    for outcome in run_ranks(train, 2, Plan(tp=2), {"scale": "complete"}, [0.0, 1.0], timeout_s=60):
        (first, _), (second, _) = outcome.value
        assert float(first["scale"].norm()) == 0.0 and second[0] == "DeclarationError"
        assert second[1].startswith(SAYS + "scale on tp")


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp_replicate=2, tp=2)], ids=["tp2", "dp2xtp2"])
def test_right_declarations_give_the_gradients_of_one_process_and_cost_nothing_after_the_first_update(plan):
    outcomes = run_ranks(train, plan.world_size, plan, {}, [1.0, 1.0, 1.0], timeout_s=60)
    for update in range(3):
        model = Mixer()
        model(torch.cat([rows_of(update, rank) for rank in range(plan.data_size)])).square().sum().backward()
        for outcome in outcomes:
            found, calls = outcome.value[update]
            for name, parameter in model.named_parameters():
                wanted = parameter.grad / (5 * plan.data_size)
                if name in ("up", "down"):
                    wanted = wanted.chunk(2, 0 if name == "up" else 1)[outcome.rank % 2]
                assert relative_error(found[name], wanted) < 1e-6, name
            assert update == 0 or list(calls.values()) == [1]
            assert update > 0 or "mixle:control:tp|allgather" in calls


def test_what_stays_undecided_is_asked_again_and_only_that():
    """scale is unused in the first two updates: the second asks about what is left, the fourth no more."""
    for outcome in run_ranks(train, 2, Plan(tp=2), {}, [0.0, 0.0, 1.0, 1.0], timeout_s=60):
        asked = ["mixle:control:tp|allgather" in calls for _, calls in outcome.value]
        assert asked == [True, True, True, False]


def test_an_owner_that_shows_no_gradient_before_it_reduces_is_an_error_on_all_ranks():
    text = "double reduced bias (3 in all) without calling observe() first, so its declaration cannot be checked"
    for outcome in run_ranks(train, 2, Plan(tp=2), {}, [1.0], "HidesEverything", timeout_s=60):
        assert outcome.value[0][0] == ("LedgerError", text)

"""A pipeline that somebody else wrote: two stages, a plain schedule and an owner, from nothing but the core's hooks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mixle_core as mx
from mixle_core.audit import verify
from mixle_core.runtime import Usage, counted_traffic, logical_parameters, reduce_coalesced
from mixle_core.testing import ToyLM, next_token_loss, run_ranks, tied_toy_model, token_batch, toy_model

Plan = mx.ParallelPlan
HIDDEN = 16
PP = Plan(pp=2, microbatches=3)
PP_DP = Plan(pp=2, dp_replicate=2, microbatches=2, gradient_accumulation_steps=2)


class Arrives(nn.Module):
    """In the place of the embedding on the last stage: what came from the stage before. It keeps a tied weight under its first name."""

    def __init__(self, pipeline, weight):
        super().__init__()
        self.pipeline = pipeline
        if weight is not None:
            self.weight = weight

    def forward(self, ids):
        return self.pipeline.arrived


class Passes(nn.Module):
    """In the place of a block of the other stage, so that the others keep their names."""

    def forward(self, hidden, use_branch=True):
        return hidden


class TwoStages:
    """Executes pp: deletes what the other stage has, and runs all forwards, then all backwards."""

    keeps_tied_name = True

    def shard(self, layout, tensor, mesh):
        return tensor

    def apply(self, model, layouts, mesh):
        self.first = mesh.coordinates["pp"] == 0
        self.group = mesh.group(("pp",), "pipe")
        self.peer = mesh.plan.group_ranks(mesh.rank, ("pp",))[1 if self.first else 0]
        if self.first:
            model.blocks[1], model.norm, model.head = Passes(), nn.Identity(), nn.Identity()
        else:
            tied = model.embed.weight.numel() > 0 and self.keeps_tied_name
            model.blocks[0], model.embed = Passes(), Arrives(self, model.embed.weight if tied else None)

    def run(self, module, microbatches, forward, loss_scale):
        (self._run_first if self.first else self._run_last)(module, microbatches, forward, loss_scale)

    def _run_first(self, module, microbatches, forward, loss_scale):
        hidden = [module(ids) for ids in microbatches]
        sent = [dist.isend(values.detach(), self.peer, self.group) for values in hidden]
        if torch.is_grad_enabled():
            for values in hidden:
                gradient = torch.empty_like(values)
                dist.recv(gradient, self.peer, self.group)
                if values.requires_grad:
                    values.backward(gradient)
        for work in sent:
            work.wait()

    def _run_last(self, module, microbatches, forward, loss_scale):
        sent = []
        for ids in microbatches:
            self.arrived = torch.empty(*ids.shape, HIDDEN)
            dist.recv(self.arrived, self.peer, self.group)
            self.arrived.requires_grad_(torch.is_grad_enabled())
            loss = forward(module, ids)
            if torch.is_grad_enabled():
                (loss * loss_scale).backward()
                sent.append((dist.isend(self.arrived.grad, self.peer, self.group), self.arrived.grad))
        for work, _ in sent:
            work.wait()


class LosesTheName(TwoStages):
    """Deletes the embedding from the last stage, as it deletes everything else: the head's weight is what is left."""

    keeps_tied_name = False


class SumsHolders:
    """Sums over the data ranks, and what both stages hold over them too: one call for each group."""

    def __init__(self, plan, layouts):
        self._layouts = layouts
        self._usage_of = partial(Usage, layouts.trainable, plan)

    def install(self, model, rows, mesh):
        # asked for by all ranks in one order, also by those that hold nothing of it, and before anything can fail
        self._groups = {
            ("dp_replicate",): mesh.group(("dp_replicate",), "pipeline"),
            ("pp", "dp_replicate"): mesh.group(("pp", "dp_replicate"), "pipeline", holders={"pp": (0, 1)}),
        }
        self._mesh = mesh
        self._rows = {row.name: row for row in rows}
        bound = logical_parameters(model, self._layouts.transparent)
        self._parameters = {name: bound[name] for name in self._rows}
        self._usage = self._usage_of(elsewhere=set(self._layouts.trainable) - self._rows.keys())
        names = {parameter: name for name, parameter in self._parameters.items()}
        self._handles = [p.register_post_accumulate_grad_hook(lambda p: self._usage.saw(names[p])) for p in names]
        self._handles.append(model.register_forward_pre_hook(lambda *_: self._usage.next_forward() if torch.is_grad_enabled() else None))
        return model

    def no_sync(self):
        return nullcontext()

    def finish(self, observe):
        unused, missing = self._usage.settle(self._mesh)
        gradients = {name: p.grad for name, p in self._parameters.items() if name not in unused and p.grad is not None}
        observe(gradients)
        for axes, group in self._groups.items():
            reduce_coalesced([gradients[name] for name in gradients if self._over(name) == axes], group)
        handed = {name: mx.Gradient(gradients.get(name), 1.0 / row.copies) for name, row in self._rows.items()}
        return mx.OwnerReduction(handed, {name: 1 for name in gradients if name not in missing})

    def _over(self, name):
        return ("pp", "dp_replicate") if "pp" in self._rows[name].reduced else ("dp_replicate",)

    def zero(self):
        for parameter in self._parameters.values():
            parameter.grad = None
        self._usage.discard()

    def close(self):
        for handle in self._handles:
            handle.remove()


class Forgets(SumsHolders):
    """Leaves the gradient of a tied weight as each stage has it."""

    def _over(self, name):
        return ("dp_replicate",)


class Pipeline:
    """Layout, executor and owner of a ToyLM in two stages."""

    def __init__(self, tied_gradient="partial", executor="TwoStages", owner="SumsHolders"):
        self.tied_gradient = tied_gradient
        self.executor = executor
        self.owner = owner

    @mx.hookimpl
    def declare_layout(self, model, plan):
        tied = model.head.weight is model.embed.weight
        first, last = mx.Replica(ranks=(0,)), mx.Replica(ranks=(1,))
        shared = mx.Replica(self.tied_gradient, ranks=(0, 1))
        stages = {
            "embed": shared if tied else first,
            "blocks.0.**": first,
            "blocks.1.**": last,
            "norm": last,
            "head": shared if tied else last,
        }
        return mx.ModelLayout(axis="pp", modules={name: mx.ModuleLayout(parameters={"*": role}) for name, role in stages.items()})

    @mx.hookimpl
    def own_axis(self, plan, layouts):
        return mx.AxisClaim(axis="pp", executor=globals()[self.executor], backend="double")

    @mx.hookimpl
    def own_reduction(self, plan, layouts):
        return mx.Claim(
            owner=partial(globals()[self.owner], plan, layouts),
            parameters=layouts.trainable,
            axes={"pp", "dp_replicate"},
            backend="double",
            whole=False,
        )


def seeded():
    """With values before anything attaches it."""
    torch.manual_seed(3)
    return ToyLM(tied=True)


MODELS = {"tied": tied_toy_model, "untied": toy_model, "with values": seeded}


def report(plan, model, plugin, max_grad_norm=0.05):
    windows = [plan.num_backwards, max(1, plan.num_backwards - 1), plan.num_backwards]
    return verify(
        MODELS[model],
        plan,
        loss=next_token_loss,
        batch=token_batch,
        windows=windows,
        max_grad_norm=max_grad_norm,
        seed=7,
        plugins={"pipeline": plugin},
    )


@pytest.mark.parametrize("plan", [PP, PP_DP], ids=["pp2", "pp2xdp2"])
@pytest.mark.parametrize("model", list(MODELS))
def test_a_pipeline_of_a_third_party_equals_one_process(model, plan):
    """Gradients, norms, loss and parameters of three updates, the second of them short; with and without a tied weight."""
    for outcome in run_ranks(report, plan.world_size, plan, model, Pipeline(), timeout_s=90, reuse=True):
        found = outcome.value
        assert found.passed(1e-5), found.updates
        assert [update.num_tokens for update in found.updates] == [
            14 * plan.data_size * n for n in (plan.num_backwards, plan.num_backwards - 1, plan.num_backwards)
        ]
        assert not any(update.skipped for update in found.updates)


@pytest.mark.parametrize("plan", [PP, PP_DP], ids=["pp2", "pp2xdp2"])
def test_a_tied_weight_that_nobody_sums_over_the_stages_does_not_pass(plan):
    for outcome in run_ranks(report, plan.world_size, plan, "tied", Pipeline(owner="Forgets"), timeout_s=90, reuse=True):
        first = outcome.value.updates[0]
        assert not outcome.value.passed(1e-5) and not first.copies_equal
        assert first.worst_gradient == "embed.weight" and first.gradient_error > 1e-2


def test_a_tied_weight_declared_complete_is_found_out_at_the_first_update():
    plugin = Pipeline(tied_gradient="complete")
    text = "embed.weight on pp: declared Replica(complete, ranks=[0, 1]), but the ranks' gradients differ by "
    for outcome in run_ranks(report, 2, PP, "tied", plugin, timeout_s=60, check=False):
        assert outcome.error == "DeclarationError" and text in outcome.message


def test_an_executor_that_loses_the_first_name_of_a_tied_parameter_is_named_on_every_rank():
    for outcome in run_ranks(report, 2, PP, "tied", Pipeline(executor="LosesTheName"), timeout_s=40, group_timeout_s=10, check=False):
        assert "embed.weight is held by this rank, and its executor left no parameter of this name" in outcome.message
        assert outcome.seconds < 20


def traffic_and_places():
    """What each rank holds, and what one update sends."""
    reduction = mx.attach(tied_toy_model(), PP_DP, seed=1, plugins={"pipeline": Pipeline()})
    names = [name for name, _ in reduction.named_parameters()]
    data_rank = reduction.mesh.coordinates["dp_replicate"]
    calls = []
    for update in range(2):
        loss_sum, tokens = reduction.run([token_batch(update, i, data_rank) for i in range(2)], next_token_loss)
        reduced = reduction.finish(tokens, float(loss_sum))
        calls.append([(owner.owner, owner.num_parameters, owner.num_collectives, owner.payload_bytes) for owner in reduced.owners])
        reduction.zero()
    groups = {key.partition("|")[0] for key in counted_traffic("mixle:pipeline:")}
    return names, sorted(reduced.gradients), calls[-1], groups, reduction.table


def test_a_stage_has_its_own_parameters_and_its_receipt_counts_what_it_sent():
    for outcome in run_ranks(traffic_and_places, 4, timeout_s=60):
        names, gradients, calls, groups, table = outcome.value
        stage = outcome.rank // 2
        wanted = [row.name for row in table.rows if row.held_by(PP_DP, outcome.rank)]
        assert names == gradients == wanted
        assert [name for name in names if name.startswith("blocks.")] == [
            row.name for row in table.rows if row.name.startswith(f"blocks.{stage}.")
        ]
        assert ("norm.weight" in names, "embed.weight" in names) == (stage == 1, True)
        assert calls == [("pipeline", len(names), 2, sum(table[name].payload_bytes for name in names))]
        assert groups == {"mixle:pipeline:dp_replicate", "mixle:pipeline:pp[0,1].dp_replicate"}
        assert table["embed.weight"] is table["head.weight"]
        assert (table["embed.weight"].group_size, table["norm.weight"].group_size) == (4, 2)


def session_of(optimizer, plan=PP):
    return mx.prepare(
        tied_toy_model(), plan, loss=next_token_loss, optimizer=optimizer, max_grad_norm=1.0, seed=7, plugins={"pipeline": Pipeline()}
    )


def rows(update, number):
    return torch.cat([token_batch(update, i, 0) for i in range(number)])


def trained():
    session = session_of(partial(torch.optim.AdamW, lr=1e-2, eps=1e-6))
    receipts = [session.train_batch(rows(update, 3)) for update in range(3)]
    return [(r.loss, r.grad_norm, r.num_tokens, r.num_local_tokens) for r in receipts]


def test_a_session_drives_a_pipeline_and_its_receipts_are_those_of_one_process():
    alone = mx.prepare(
        tied_toy_model(),
        Plan(microbatches=3),
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-6),
        max_grad_norm=1.0,
        seed=7,
        plugins={},
    )
    wanted = [(r.loss, r.grad_norm, r.num_tokens, r.num_local_tokens) for r in (alone.train_batch(rows(update, 3)) for update in range(3))]
    for outcome in run_ranks(trained, 2, timeout_s=60):
        for mine, theirs in zip(outcome.value, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)


def evaluated():
    session = session_of(partial(torch.optim.SGD, lr=0.1))
    return session.evaluate([rows(0, 2)])


def test_a_session_evaluates_a_pipeline():
    alone = mx.prepare(tied_toy_model(), Plan(), loss=next_token_loss, optimizer=partial(torch.optim.SGD, lr=0.1), seed=7, plugins={})
    wanted = alone.evaluate([rows(0, 2)])
    for outcome in run_ranks(evaluated, 2, timeout_s=40, group_timeout_s=10):
        assert outcome.value == pytest.approx(wanted, rel=1e-5)


def routed(stage):
    sgd = partial(torch.optim.SGD, lr=0.1)
    routes = {0: ("blocks.0.**", "{embed,norm,blocks.1}.**"), 1: ("norm.*", "{embed,blocks}.**")}[stage]
    session = session_of(dict.fromkeys(routes, sgd))
    return sorted(session.optimizers), session.train_batch(rows(0, 3)).loss, routes


@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_of_parameters_of_one_stage_is_on_that_stage_only(stage):
    for outcome in run_ranks(routed, 2, stage, timeout_s=60):
        built, loss, (there, everywhere) = outcome.value
        assert built == sorted([there, everywhere] if outcome.rank == stage else [everywhere]) and loss > 1.0


def frozen_stage(drive):
    """Stage 0 has nothing to train; one update by hand, or by a session."""
    model = toy_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embed", "blocks.0")))
    options = {"seed": 7, "plugins": {"pipeline": Pipeline()}}
    if drive == "session":
        session = mx.prepare(model, PP, loss=next_token_loss, optimizer=partial(torch.optim.SGD, lr=0.1), **options)
        return session.train_batch(rows(0, 3)).num_tokens, None
    reduction = mx.attach(model, PP, **options)
    optimizer = reduction.build_optimizer(partial(torch.optim.SGD, lr=0.1))
    loss_sum, tokens = reduction.run([token_batch(0, i, 0) for i in range(3)], next_token_loss)
    return reduction.finish(tokens, float(loss_sum)).num_tokens, optimizer is None


@pytest.mark.parametrize("drive", ["loop", "session"])
def test_a_stage_without_trainable_parameters_takes_part(drive):
    for outcome in run_ranks(frozen_stage, 2, drive, timeout_s=40, group_timeout_s=10):
        assert outcome.value == (42, None if drive == "session" else outcome.rank == 0)

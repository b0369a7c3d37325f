"""Plugins that break one rule each. A suite says in `breaks` which check has to fail, and in `says` in which words."""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager
from typing import ClassVar

import attrs
import torch
import torch.distributed as dist

import mixle_core as mx
from mixle_core.testing import SumOwner, check

from .good import (
    NEVER,
    SHARED,
    WHOLE,
    Columns,
    Executor,
    ExecutorSuite,
    Layout,
    NetSuite,
    Owner,
    OwnerSuite,
    Plan,
    RefusingSuite,
    State,
    StateSuite,
)


class NoSuchCheck(RefusingSuite):
    unsupported: ClassVar = {**NEVER, "equal_to_one_process": "misspelt"}
    breaks, says = "exemptions_are_known", r"names 'equal_to_one_process', which is no check; the checks are .*equals_one_process"


class NotInstalled(OwnerSuite):
    plugin, plugin_name = None, "torch-dpp"
    breaks, says = "discovered", "no plugin named 'torch-dpp' is installed"


class Misspelt(NetSuite):
    class Plugin(Layout):
        @mx.hookimpl
        def declare_layouts(self, model):
            return None

    plugin = Plugin()
    breaks, says = "discovered", "hook 'declare_layouts' does not exist; the nearest is 'declare_layout'"


class AnotherError(NetSuite):
    class Plugin(Layout):
        @mx.hookimpl
        def build_model(self, spec):
            return {"small": None}[spec]

    plugin = Plugin()
    breaks, says = "unknown_model_is_refused", "raised KeyError: 'no-such-model'; expected a UsageError"


class AsksItsRank(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            return super().modules(model, plan) if dist.get_rank() >= 0 else {}

    plugin = Plugin()
    breaks, says = "answers_without_processes", "a hook raised ValueError: Default process group has not been initialized"


class ForgetsAParameter(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            return {**super().modules(model, plan), "{norm,first,last}": mx.ModuleLayout(parameters={"weight": WHOLE})}

    plugin = Plugin()
    breaks, says = "layout_covers_parameters", "3 of 11 parameters are undeclared on axis 'tp'"


class DividesItself(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            if 16 % plan.tp:
                raise ValueError("cannot divide")
            return super().modules(model, plan)

    plugin = Plugin()
    breaks, says = "layout_refuses_other_sizes", "tp=8191 divides nothing, and raised ValueError: cannot divide; expected a CapabilityError"


class WritesOnTheModel(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            model.size_of_tp = plan.tp
            return super().modules(model, plan)

    plugin = Plugin()
    breaks, says = "layout_is_repeatable", "changed module at the root of the model"


class ReadsValues(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            modules = super().modules(model, plan)
            known = modules["scale"].parameters if model.scale.factor.is_meta else {"{factor,factor}": WHOLE}
            return {**modules, "scale": mx.ModuleLayout(parameters=known)}

    plugin = Plugin()
    breaks, says = "layout_is_repeatable", "answers differently for the model on meta under tp=2"


class NamesLess(NetSuite):
    class Plugin(Layout):
        @mx.hookimpl
        def init_params(self, model, layouts, seed):
            return super().init_params(model, layouts, seed) and frozenset()

    plugin = Plugin()
    breaks, says = "init_names_what_it_fills", r"filled scale\.factor and did not name it"


class DrawsFromTheMachine(NetSuite):
    class Plugin(Layout):
        def values(self, shape, seed):
            return torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8).float()[: shape[0]]

    plugin = Plugin()
    breaks, says = "init_is_repeatable", r"fills scale\.factor otherwise when it was asked again with the same seed"


class FillsAConstant(NetSuite):
    class Plugin(Layout):
        def values(self, shape, seed):
            return torch.full(shape, 0.5)

    plugin = Plugin()
    breaks, says = "init_follows_the_seed", r"fills scale\.factor \(1 such\) alike with seeds 1 and 2"


class DrawsFromPython(NetSuite):
    class Plugin(Layout):
        def values(self, shape, seed):
            random.random()
            return super().values(shape, seed)

    plugin = Plugin()
    breaks, says = "init_leaves_global_generators", "changed the global generator of Python"


class KnowsThePlan(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            self.tp = plan.tp
            return super().modules(model, plan)

        def values(self, shape, seed):
            return super().values(shape, seed) / self.tp

    plugin = Plugin()
    breaks, says = "init_ignores_the_plan", r"fills scale\.factor otherwise under tp=2"


class RaisesWhatItLacks(OwnerSuite):
    class Plugin(Owner):
        @mx.hookimpl
        def own_reduction(self, plan, layouts):
            if plan.dp_shard > 1:
                raise NotImplementedError("sharding")
            return super().own_reduction(plan, layouts)

    plugin = Plugin()
    breaks, says = "refusals_have_reasons", "dp_shard=2 raised NotImplementedError: sharding; expected a Refusal"


class HasNoRemedy(OwnerSuite):
    class Plugin(Owner):
        @mx.hookimpl
        def own_reduction(self, plan, layouts):
            return mx.Refusal("no", "") if plan.dp_shard > 1 else super().own_reduction(plan, layouts)

    plugin = Plugin()
    breaks, says = "refusals_have_reasons", "own_reduction refuses dp_shard=2 without a remedy"


class NobodyExecutes(NetSuite):
    extra: ClassVar = {}
    breaks, says = "plans_reach_the_plugin", "plan tp=2 splits the forward over tp, and no loaded plugin executes tp; name an installed one"


class NeverRuns(NetSuite):
    plans = (Plan(dp_replicate=2),)
    breaks, says = "plans_reach_the_plugin", "`sizes` has tp, and no plan of `plans` has it above 1"


class ClaimsTwice(OwnerSuite):
    class Plugin(Owner):
        @mx.hookimpl
        def own_reduction(self, plan, layouts):
            claim = super().own_reduction(plan, layouts)
            return claim, attrs.evolve(claim, parameters=["head.weight"])

    plugin = Plugin()
    breaks, says = "one_owner_per_parameter", "several for 1 of 22"


class DependsOnTheRank(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            odd = dist.is_initialized() and dist.get_rank() == 1
            return {**super().modules(model, plan), "scale": mx.ModuleLayout(parameters={"factor": SHARED if odd else WHOLE})}

    plugin = Plugin()
    breaks, says = "ranks_agree", r"ranks prepared different things: rank 1 differs from rank 0"


class CutsTheOtherWayRound(ExecutorSuite):
    class Plugin(Executor):
        class columns(Columns):
            def place(self, mesh):
                return 1 - mesh.coordinates["tp"]

    plugin = Plugin()
    breaks, says = "starts_as_one_process", r"tp=2: down\.weight starts with other values than in one process"


class CountsTwice(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def finish(self, observe):
                done = super().finish(observe)
                return mx.OwnerReduction(done.gradients, {**done.counts, "head.weight": 2})

    plugin = Plugin()
    breaks, says = "owner_reduces_once", r"1 of 22 parameters were not reduced exactly once: head\.weight: reduced 2 times by owner"


class KeepsGradients(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def zero(self):
                self._usage.discard()

    plugin = Plugin()
    breaks, says = "owner_drops_gradients", r"has a gradient after zero\(\) \(22 such\)"


class TalksInsideNoSync(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            @contextmanager
            def no_sync(self):
                yield
                dist.all_reduce(torch.zeros(1), group=next(iter(self._groups.values())))

    plugin = Plugin()
    breaks, says = "owner_honours_no_sync", r"an update of four backwards made 4 reductions, one of a single backward 1"


class LeavesItsHooks(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def close(self):
                pass

    plugin = Plugin()
    breaks, says = "owner_removes_its_hooks", r"close\(\) left 1 hooks on module at the root \(23 such\)"


class GivesZeros(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def finish(self, observe):
                done = super().finish(observe)
                gradients = {
                    n: mx.Gradient(torch.zeros(self._parameters[n].shape), g.weight) if g.tensor is None else g
                    for n, g in done.gradients.items()
                }
                return mx.OwnerReduction(gradients, dict.fromkeys(gradients, 1))

    plugin = Plugin()
    breaks, says = "owner_knows_unused_parameters", "update 1: the gradient of .* is inf off one process"


class WaitsForEver(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def finish(self, observe):
                try:
                    return super().finish(observe)
                except RuntimeError:
                    time.sleep(2.0)
                    raise

    plugin = Plugin()
    failure_limit_s = 1.5
    breaks, says = "failure_ends_everywhere", r"rank 0 had not ended 1\.5 s after another rank ended"


class SumsTooMuch(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def finish(self, observe):
                done = super().finish(observe)
                done.gradients["head.weight"].tensor.mul_(1.001)
                return done

    plugin = Plugin()
    breaks, says = "equals_one_process", r"dp_replicate=2, update 0: the gradient of head\.weight is 1\.0e-03 off one process"


class GivesFrozenOnes(OwnerSuite):
    class Plugin(Owner):
        class kind(SumOwner):
            def install(self, model, rows, mesh):
                self.model = model
                return super().install(model, rows, mesh)

            def finish(self, observe):
                for parameter in self.model.parameters():
                    if parameter.grad is None and not parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
                return super().finish(observe)

    plugin = Plugin()
    breaks, says = "frozen_parameters", "is frozen and has a gradient after an update"


class SkipsFrozenOnes(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            modules = super().modules(model, plan)
            return (
                modules
                if model.norm.bias.requires_grad
                else {**modules, "{norm,first,last}": mx.ModuleLayout(parameters={"weight": WHOLE})}
            )

    plugin = Plugin()
    breaks, says = "frozen_parameters", "3 of 11 parameters are undeclared on axis 'tp'"


class TiesTwoRoles(NetSuite):
    class Plugin(Layout):
        def modules(self, model, plan):
            modules = super().modules(model, plan)
            if model.last.weight is not model.first.weight:
                return modules
            plain = modules.pop("{norm,first,last}")
            return {**modules, "{norm,first}": plain, "last": mx.ModuleLayout(parameters={"weight": mx.Shard(0), "bias": WHOLE})}

    plugin = Plugin()
    breaks, says = "tied_parameters", "one tied parameter was declared with 2 roles on 'tp'"


class ForgetsMomentum(StateSuite):
    class Plugin(State):
        def kinds(self, reader, name):
            return ("parameter",)

    plugin = Plugin()
    breaks, says = "state_round_trips", "exp_avg of .* is other after load_state than it was at save_state"


class SavesOnly(OwnerSuite):
    class Plugin(Owner):
        @mx.hookimpl
        def save_state(self, model):
            return ()

    plugin = Plugin()
    breaks, says = "state_round_trips", "the plugin has no load_state, and has the other one"


class Exempted(RefusingSuite):
    """It passes what it exempts."""

    unsupported: ClassVar = {**NEVER, "refusals_have_reasons": "never looked"}
    breaks, says = "refusals_have_reasons", r"check refusals_have_reasons is in `unsupported` \(never looked\), and it passes; remove it"


class ExemptedWithoutObject(RefusingSuite):
    """It exempts what has nothing to judge."""

    unsupported: ClassVar = {**NEVER, "state_round_trips": "never looked"}
    breaks, says = "state_round_trips", r"has nothing to judge here \(the plugin has no save_state or load_state hook\); remove it"


class OwnCheck(RefusingSuite):
    """It brings a check of its own, which is new in a version to come."""

    @check(since="0.2")
    def test_of_tomorrow(self):
        raise ArithmeticError("not yet")

    @check(since="0.1", needs=["discovered"])
    def test_of_today(self):
        raise ArithmeticError("at once")

    breaks, says = "of_today", "check of_today: ArithmeticError: at once"


SUITES = [kind for kind in list(globals().values()) if isinstance(kind, type) and "breaks" in vars(kind)]

"""Checks of discovery, answers and ownership, and of what owners do on several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import attrs
import torch.distributed as dist

from mixle_core.audit import VerifyReport
from mixle_core.errors import MixleError, UsageError
from mixle_core.ownership import LOCAL_OWNER, AxisClaim, Claim, OwnershipTable, Refusal
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import installed_plugins, require_installed
from mixle_core.runtime import explain
from mixle_core.testing import conformance_ranks as ranks
from mixle_core.testing.conformance_rules import broken, nothing_to_judge, rules
from mixle_core.testing.conformance_subject import Subject, items

_LIST = "import sys, mixle_core; mixle_core.installed_plugins(); print(*sys.modules)"

KINDS_OF_PLANS = (
    ParallelPlan(pp=2),
    ParallelPlan(dp_replicate=2),
    ParallelPlan(dp_shard=2),
    ParallelPlan(cp=2),
    ParallelPlan(tp=2),
    ParallelPlan(dp_replicate=2, dp_shard=2),
    ParallelPlan(dp_shard=2, ep=2),
    ParallelPlan(tp=2, sequence_parallel=True),
    ParallelPlan(dp_replicate=2, tp=2, precision="bf16"),
    ParallelPlan(dp_replicate=2, tp=2, activation_checkpointing=True),
    ParallelPlan(dp_shard=2, tp=2, microbatches=3),
)
"""What users ask for, whether or not a plugin has it."""


def exemptions_are_known(s: Subject) -> None:
    """See PluginConformance.test_exemptions_are_known."""
    known = rules(type(s.suite))
    unknown = sorted(s.suite.unsupported.keys() - known.keys())
    if unknown:
        broken(f"`unsupported` names {unknown[0]!r}, which is no check; the checks are {', '.join(known)}")
    silent = [name for name, reason in s.suite.unsupported.items() if not str(reason).strip()]
    if silent:
        broken(f"`unsupported` gives no reason for {silent[0]}; say in a sentence why the plugin cannot fulfil it")


def discovered(s: Subject) -> None:
    """See PluginConformance.test_discovered."""
    if s.suite.plugin is None:
        _installed(s.name)
    if not s.hooks:
        broken(f"{s.name} implements no hook; mark its functions with mixle_core.hookimpl, in the module that the entry point names")


def _installed(name: str) -> None:
    require_installed([name])
    facts = {plugin.name: plugin for plugin in installed_plugins()}[name]
    own = facts.distribution.removeprefix("mixle-")
    if not facts.distribution.startswith("mixle-") or (name != own and not name.startswith(f"{own}-")):
        broken(
            f"{facts.distribution} registers the plugin {name!r}; expected distribution mixle-{name}, or another one's name before a hyphen"
        )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    listed = subprocess.run([sys.executable, "-c", _LIST], env=env, capture_output=True, text=True, timeout=60, check=False)
    module = facts.value.partition(":")[0]
    if listed.returncode:
        broken(f"listing the plugins failed: {listed.stderr.strip()[-300:]}")
    if module in listed.stdout.split():
        broken(f"listing the plugins imported {module}; nothing may import it at the start of Python, such as a .pth file")


def unknown_model_is_refused(s: Subject) -> None:
    """See PluginConformance.test_unknown_model_is_refused."""
    s.require("build_model")
    unknown = "no-such-model"
    try:
        answer = s.loaded.ask_one(s.name, "build_model", spec=unknown)
    except UsageError as error:
        if unknown not in str(error):
            broken(f"the error about {s.name}:{unknown} does not name it: {error}")
        return
    except Exception as error:
        broken(f"build_model({unknown!r}) raised {type(error).__name__}: {error}; expected a UsageError that names the known ones")
    broken(f"build_model({unknown!r}) returned {type(answer).__name__}; expected a UsageError that names the known ones")


def answers_without_processes(s: Subject) -> None:
    """See PluginConformance.test_answers_without_processes."""
    if dist.is_initialized():  # by another test of this process
        s.on_ranks(ranks.answers, 1, fresh=True)
    else:
        ranks.ask(s)


def refusals_have_reasons(s: Subject) -> None:
    """See PluginConformance.test_refusals_have_reasons."""
    loaded = s.loaded
    for plan in KINDS_OF_PLANS:
        model = s.build()
        try:
            layouts = s.layouts(plan, model, loaded)
            for hook, expected in (("own_axis", AxisClaim), ("own_reduction", Claim)):
                if hook == "own_axis" and not plan.executed_axes:
                    continue
                answer = loaded.ask_one(s.name, hook, model=model, plan=plan, layouts=layouts)
                for item in () if answer is None else items(answer):
                    _judge_answer(hook, plan, item, expected)
        except MixleError as error:
            if not str(error).strip():
                broken(f"{plan.describe()} is refused with a {type(error).__name__} without words; say why, and the way out")
        except AssertionError:
            raise
        except Exception as error:
            broken(
                f"{plan.describe()} raised {type(error).__name__}: {error}; expected a Refusal or a CapabilityError with reason and remedy"
            )


def _judge_answer(hook: str, plan: ParallelPlan, item: Any, expected: type) -> None:
    if isinstance(item, Refusal):
        for part in ("reason", "remedy"):
            text = getattr(item, part)
            if not isinstance(text, str) or not text.strip():
                broken(f"{hook} refuses {plan.describe()} without a {part}; the user reads both")
    elif not isinstance(item, expected):
        broken(f"{hook} returned {type(item).__name__} under {plan.describe()}; expected {expected.__name__}, Refusal or None")


def plans_reach_the_plugin(s: Subject) -> None:
    """See PluginConformance.test_plans_reach_the_plugin."""
    if not s.plans() or all(plan.world_size == 1 for plan in s.plans()):
        broken("`plans` has no plan of several processes, so nothing is compared with one process; add one")
    for plan in s.plans():
        for axis, bidders in s.executed(plan).items():
            if not bidders:
                broken(
                    f"plan {plan.describe()} splits the forward over {axis}, and no loaded plugin executes {axis}; name an installed one "
                    'that does in `beside`, such as beside = ("NAME",); `mixle plugins` lists them'
                )
    if "own_reduction" in s.hooks:
        s.owned_plan()
    if s.only_owns:
        for plan in s.several_processes():
            if s.name not in s.plugins(plan)[1]:
                broken(f"{s.name} claims nothing under {plan.describe()}; leave this plan out of `plans`")
    for axis in s.suite.sizes if s.hooks & {"declare_layout", "own_axis"} else ():
        if not any(axis in plan.executed_axes for plan in s.plans()):
            broken(f"`sizes` has {axis}, and no plan of `plans` has it above 1, so its layout or execution is never run; add such a plan")


def one_owner_per_parameter(s: Subject) -> None:
    """See PluginConformance.test_one_owner_per_parameter."""
    for plan in s.plans():
        table = _table(s, plan)
        layouts = s.layouts(plan)
        names = [row.name for row in table.rows]
        if sorted(names) != sorted(layouts.trainable):
            broken(f"under {plan.describe()} the table has {len(names)} rows for {len(layouts.trainable)} trainable parameters")
        others = [row for row in table.rows if row.owner != LOCAL_OWNER and row.owner.partition("/")[0] != s.name]
        if s.only_owns and others:
            broken(f"under {plan.describe()} {others[0].name} belongs to {others[0].owner}; {s.name} claims everything with a pending axis")


def _table(s: Subject, plan: ParallelPlan, model: Any = None) -> OwnershipTable:
    return explain(model or s.build(), plan, backend=s.suite.backend, plugins=s.plugins(plan, model)[0])


def ranks_agree(s: Subject) -> None:
    """See PluginConformance.test_ranks_agree."""
    for plan in s.several_processes():
        found = s.on_ranks(ranks.prepares, plan.world_size, plan)
        if len(set(found)) > 1:
            broken(f"under {plan.describe()} the ranks have tables of different digests: {', '.join(digest[:8] for digest in found)}")


def starts_as_one_process(s: Subject) -> None:
    """See PluginConformance.test_starts_as_one_process."""
    for plan in s.plans():
        s.on_ranks(ranks.starts_alike, plan.world_size, plan)


def owner_reduces_once(s: Subject) -> None:
    """See PluginConformance.test_owner_reduces_once."""
    plan = s.owned_plan()
    s.on_ranks(ranks.reduces_once, plan.world_size, plan)


def owner_drops_gradients(s: Subject) -> None:
    """See PluginConformance.test_owner_drops_gradients."""
    plan = s.owned_plan()
    s.on_ranks(ranks.drops_gradients, plan.world_size, plan)


def owner_honours_no_sync(s: Subject) -> None:
    """See PluginConformance.test_owner_honours_no_sync."""
    plan = s.owned_plan()
    one, four = s.on_ranks(ranks.num_reductions, plan.world_size, plan)[0]
    if four > one:
        broken(f"an update of four backwards made {four} reductions, one of a single backward {one}; inside no_sync() nothing is reduced")


def owner_removes_its_hooks(s: Subject) -> None:
    """See PluginConformance.test_owner_removes_its_hooks."""
    plan = s.owned_plan()
    s.on_ranks(ranks.removes_hooks, plan.world_size, plan)


def owner_knows_unused_parameters(s: Subject) -> None:
    """See PluginConformance.test_owner_knows_unused_parameters."""
    plan = attrs.evolve(s.owned_plan(), unused_parameters=True)
    if s.suite.unused_batch(1, 0, 0) is None:
        nothing_to_judge("unused_batch() returns None: no batch leaves a parameter of make_model() out")
    _compare(s, plan, batch="unused_batch")


def failure_ends_everywhere(s: Subject) -> None:
    """See PluginConformance.test_failure_ends_everywhere."""
    plan = s.owned_plan()
    limit = s.suite.failure_limit_s
    for outcome in ranks.run_failing(s.reference, plan, limit):
        if outcome.error == "Timeout" or outcome.seconds > limit:
            broken(f"rank {outcome.rank} had not ended {limit:g} s after another rank ended; what waits for a lost rank raises")
        if outcome.error is None and outcome.exitcode == 0:
            broken(f"rank {outcome.rank} went on as if no other rank had ended; an owner passes errors on")


def equals_one_process(s: Subject) -> None:
    """See PluginConformance.test_equals_one_process."""
    for plan in s.plans() or nothing_to_judge("`plans` is empty"):
        _compare(s, plan)


def frozen_parameters(s: Subject) -> None:
    """See PluginConformance.test_frozen_parameters."""
    plan = s.several_processes()[0]
    model = s.build_frozen()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if not frozen:
        nothing_to_judge("make_model() has too few parameters to freeze one")
    rows = {row.name for row in _table(s, plan, model).rows}
    if rows & {*frozen}:
        broken(f"{min(rows & {*frozen})} is frozen and has a row in the table")
    s.on_ranks(ranks.leaves_frozen_alone, plan.world_size, plan)
    _compare(s, plan, build="build_frozen")


def tied_parameters(s: Subject) -> None:
    """See PluginConformance.test_tied_parameters."""
    if s.suite.make_tied_model() is None:
        nothing_to_judge("make_tied_model() returns None: the plugin's models have no tied parameters")
    plan = s.several_processes()[0]
    table = _table(s, plan, s.build_tied())
    layouts = s.layouts(plan, s.build_tied())
    aliases = {alias for layout in layouts.parameters.values() for alias in layout.aliases}
    if not aliases:
        broken("make_tied_model() has no tied parameters; let two modules share one, or return None")
    twice = aliases & {row.name for row in table.rows}
    if twice:
        broken(f"{min(twice)} is another name of a tied parameter and has a row of its own")
    _compare(s, plan, build="build_tied")


def state_round_trips(s: Subject) -> None:
    """See PluginConformance.test_state_round_trips."""
    s.require("save_state", "load_state")
    missing = {"save_state", "load_state"} - s.hooks
    if missing:
        broken(f"the plugin has no {missing.pop()}, and has the other one; state that is saved is loaded again")
    for plan in s.plans():
        s.on_ranks(ranks.state_round_trips, plan.world_size, plan)


def _compare(s: Subject, plan: ParallelPlan, *, build: str = "build", batch: str = "batch") -> None:
    report: VerifyReport = s.on_ranks(ranks.against_one_process, plan.world_size, plan, build, batch)[0]
    if report.passed(s.suite.tolerance):
        return
    for number, update in enumerate(report.updates):
        if not update.num_tokens:
            broken(f"update {number} has no loss token, so nothing is compared; loss() returns their number")
        if not update.copies_equal:
            broken(f"{plan.describe()}, update {number}: ranks that hold the same parameter have different values of it")
        if update.error > s.suite.tolerance:
            cause = f" ({update.cause})" if update.cause else ""
            broken(
                f"{plan.describe()}, update {number}: the gradient of {update.worst_gradient} is {update.gradient_error:.1e} off one "
                f"process{cause}, the norm {update.norm_error:.1e}, {update.worst_parameter} {update.parameter_error:.1e}; "
                f"expected at most {s.suite.tolerance:.0e}"
            )

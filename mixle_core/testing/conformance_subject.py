"""What the checks share: the plugin under test as a suite names it, its models, what to load with it, and its ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from mixle_core.declarations import declared_layouts, resolve_layouts
from mixle_core.layout import Layouts, ModelLayout
from mixle_core.ownership import AxisClaim, Claim
from mixle_core.plan import MODEL_AXES, ParallelPlan
from mixle_core.plugins import LoadedPlugins, load_plugins
from mixle_core.testing.conformance_rules import broken, nothing_to_judge
from mixle_core.testing.doubles import OwnsEverything
from mixle_core.testing.models import ToyLayout, ToyLM
from mixle_core.testing.pool import Outcome, _reference, _resolve, run_ranks

UNNAMED = "plugin-under-test"
OWNS = "owns-everything"
"""The double that owns gradients where nobody loaded claims them."""

Reference = tuple[str, str, str]
"""Where a suite's class is found again in another process."""


@attrs.frozen(eq=False)
class Subject:
    """A suite's plugin under test."""

    suite: Any
    name: str

    @classmethod
    def of(cls, suite: Any) -> Subject:
        """The subject of a `PluginConformance`."""
        if suite.plugin is None and not suite.plugin_name:
            broken(f"{type(suite).__name__} names no plugin; set plugin_name to its entry point, or plugin to the object")
        return _known.setdefault(type(suite), cls(suite, suite.plugin_name or UNNAMED))

    @classmethod
    def at(cls, reference: Reference) -> Subject:
        """The same in another process."""
        found: Any = _resolve(*reference)
        return cls.of(found())

    @functools.cached_property
    def loaded(self) -> LoadedPlugins:
        """The plugin, and what the suite names beside it."""
        return self._load({})

    @functools.cached_property
    def loaded_with_owner(self) -> LoadedPlugins:
        """The same with the double that owns everything."""
        return self._load({OWNS: OwnsEverything(backend=OWNS)})

    def _load(self, double: Mapping[str, Any]) -> LoadedPlugins:
        names = [*self.suite.beside, *(() if self._in_code else (self.name,))]
        toy = {"toy-layout": ToyLayout()} if "declare_layout" not in self.hooks and isinstance(self.build(), ToyLM) else {}
        return load_plugins(names, extra={**self._in_code, **self.suite.extra, **toy, **double})

    @property
    def _in_code(self) -> dict[str, Any]:
        return {} if self.suite.plugin is None else {self.name: self.suite.plugin}

    @functools.cached_property
    def hooks(self) -> frozenset[str]:
        """The hooks that the plugin implements."""
        manager = load_plugins([] if self._in_code else [self.name], extra=self._in_code).manager
        return frozenset(caller.name for caller in manager.get_hookcallers(manager.get_plugin(self.name)) or ())

    def require(self, *hooks: str) -> None:
        """Skip the check when the plugin has none of `hooks`."""
        if not self.hooks & {*hooks}:
            nothing_to_judge(f"the plugin has no {' or '.join(hooks)} hook")

    @property
    def only_owns(self) -> bool:
        """Whether it owns gradients and has no part in any model axis."""
        return "own_reduction" in self.hooks and not self.hooks & {"declare_layout", "own_axis"}

    def build(self) -> nn.Module:
        """The suite's model, equal at every call."""
        return self._seeded(self.suite.make_model)

    def build_tied(self) -> nn.Module:
        """The suite's model with tied parameters."""
        return self._seeded(self.suite.make_tied_model)

    def build_frozen(self) -> nn.Module:
        """The suite's model with every second parameter frozen."""
        model = self.build()
        for number, parameter in enumerate(model.parameters()):
            if number % 2:
                parameter.requires_grad_(False)
        return model

    def _seeded(self, make: Callable[[], Any]) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
        if not isinstance(model, nn.Module):
            broken(f"make_model() returned {type(model).__name__}; expected a torch.nn.Module")
        return model

    def build_on(self, device: str) -> nn.Module:
        """The suite's model on meta, or with some values on the CPU, with its ties."""
        model = self.build()
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            memo[id(parameter)] = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.zeros_like(buffer, device=device)
        return copy.deepcopy(model, memo)

    def layout_plans(self) -> list[ParallelPlan]:
        """A plan for every axis and size that the suite names."""
        return [sized(axis, size) for axis, sizes in self.suite.sizes.items() for size in sizes]

    def plans(self, num_processes: int | None = None) -> list[ParallelPlan]:
        """The suite's plans, or the default ones; of one number of processes where it is given."""
        found = self.suite.plans
        if found is None and self.only_owns:
            found = [ParallelPlan(), ParallelPlan(dp_replicate=2), ParallelPlan(dp_replicate=4)]
        elif found is None:
            model_axes = [sized(axis, sizes[0]) for axis, sizes in self.suite.sizes.items()]
            found = [ParallelPlan(), *model_axes, *(attrs.evolve(plan, dp_replicate=2) for plan in model_axes if plan.data_size == 1)]
        return [plan for plan in found if num_processes in (None, plan.world_size)]

    def owned_plan(self) -> ParallelPlan:
        """The smallest plan of several processes under which the plugin owns gradients."""
        self.require("own_reduction")
        for plan in self.several_processes():
            _, claims = self.plugins(plan)
            if self.name in claims:
                return plan
        return broken(f"{self.name} has own_reduction and claims nothing under {self._shown()}; add a plan that it owns to `plans`")

    def several_processes(self) -> list[ParallelPlan]:
        """The plans of more than one process, the smallest first."""
        found = sorted((plan for plan in self.plans() if plan.world_size > 1), key=lambda plan: plan.world_size)
        return found or nothing_to_judge("`plans` has no plan of several processes")

    def _shown(self) -> str:
        return "; ".join(plan.describe() for plan in self.plans()) or "no plan at all"

    def layouts(self, plan: ParallelPlan, model: nn.Module | None = None, loaded: LoadedPlugins | None = None) -> Layouts:
        """What is declared of the model."""
        model = model or self.build()
        return resolve_layouts(model, plan, declared_layouts(loaded or self.loaded, model, plan))

    def declared(self, plan: ParallelPlan, model: nn.Module | None = None) -> tuple[ModelLayout, ...]:
        """What the plugin itself answers to `declare_layout`; nothing for None."""
        answer = self.loaded.ask_one(self.name, "declare_layout", model=model or self.build(), plan=plan, declared={})
        return answer if isinstance(answer, tuple) else () if answer is None else (answer,)

    def plugins(self, plan: ParallelPlan, model: nn.Module | None = None) -> tuple[LoadedPlugins, frozenset[str]]:
        """What to attach with under `plan`, and who of it claims gradients.

        The double that owns everything is added where nobody claims, unless owning is all that the plugin does.
        """
        loaded, model = self.loaded, model or self.build()
        layouts = self.layouts(plan, model, loaded)
        answers = loaded.ask("own_reduction", model=model, plan=plan, layouts=layouts)
        claims = frozenset(who for who, answer in answers for item in items(answer) if isinstance(item, Claim))
        if claims or self.only_owns or self.suite.backend is not None:
            return loaded, claims
        return self.loaded_with_owner, frozenset({OWNS})

    def executed(self, plan: ParallelPlan) -> dict[str, frozenset[str]]:
        """Axis -> who bids to execute it."""
        loaded, model = self.loaded, self.build()
        layouts = self.layouts(plan, model, loaded)
        answers = loaded.ask("own_axis", model=model, plan=plan, layouts=layouts)
        bids = [(item.axis, who) for who, answer in answers for item in items(answer) if isinstance(item, AxisClaim)]
        return {axis: frozenset(who for claimed, who in bids if claimed == axis) for axis in plan.executed_axes}

    def on_ranks(
        self, function: Callable[..., Any], num_processes: int, *args: Any, fresh: bool = False, timeout_s: float = 120.0
    ) -> list[Any]:
        """`function(reference, *args)` on so many ranks; what each returned.

        Raises:
            NotConformingError: a rank failed, in its words.
        """
        outcomes = run_ranks(
            function, num_processes, self.reference, *args, check=False, reuse=not fresh, timeout_s=timeout_s, group_timeout_s=40.0
        )
        failed = [outcome for outcome in outcomes if outcome.error is not None or outcome.exitcode != 0]
        if failed:
            broken(_words(min(failed, key=_secondary), num_processes))
        return [outcome.value for outcome in outcomes]

    @property
    def reference(self) -> Reference:
        """For `at`."""
        kind = type(self.suite)
        if "<locals>" in kind.__qualname__:
            broken(
                f"{kind.__qualname__} is defined inside a function, where other processes do not find it; define it at the top of its file"
            )
        return _reference(kind)


_known: dict[type, Subject] = {}


def _secondary(outcome: Outcome) -> tuple[bool, bool, float]:
    """Sorts first the failure that explains the others: an error of its own before a lost connection, the earliest first."""
    return outcome.error is None, outcome.error in ("RuntimeError", "DistBackendError", "Timeout"), outcome.seconds


def _words(outcome: Outcome, num_processes: int) -> str:
    if outcome.error is None:
        return f"rank {outcome.rank} of {num_processes} ended with exit code {outcome.exitcode} and without a word"
    kind = "" if outcome.error == "NotConformingError" else f"{outcome.error}: "
    return f"rank {outcome.rank} of {num_processes}: {kind}{outcome.message}"


def items(answer: Any) -> tuple[Any, ...]:
    """The parts of an answer that may be one or a tuple."""
    return answer if isinstance(answer, tuple) else (answer,)


def sized(axis: str, size: int) -> ParallelPlan:
    """The smallest plan with `size` ranks on a model axis."""
    if axis not in MODEL_AXES:
        broken(f"sizes names axis {axis!r}; expected some of {', '.join(MODEL_AXES)}")
    fields: dict[str, Any] = {axis: size}
    return ParallelPlan(dp_shard=size, **fields) if axis in ("ep", "etp") else ParallelPlan(**fields)

"""Checks of what a layout declares and of the values that it fills; they need neither ranks nor an executor."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from mixle_core.declarations import require_declared
from mixle_core.errors import CapabilityError
from mixle_core.layout import Layouts, Shard, join, logical_name
from mixle_core.plan import MODEL_AXES, ParallelPlan
from mixle_core.runtime.initialise import logical_parameters, place_parameters
from mixle_core.testing.conformance_rules import broken, nothing_to_judge
from mixle_core.testing.conformance_subject import Subject, sized

NO_DIVISOR = 8191
"""A prime above what a small model has of anything."""


def layout_covers_parameters(s: Subject) -> None:
    """See PluginConformance.test_layout_covers_parameters."""
    s.require("declare_layout")
    if not s.suite.sizes:
        broken("`sizes` names no axis; expected what the layout declares, such as {'tp': (2,)}")
    for plan in s.layout_plans():
        if not s.declared(plan):
            broken(f"declare_layout returned None for make_model() under {plan.describe()}; let make_model() build a model that it knows")
        layouts = s.layouts(plan)
        for axis in MODEL_AXES:
            if axis in plan.executed_axes:
                require_declared(layouts, axis, plan)


def layout_refuses_other_sizes(s: Subject) -> None:
    """See PluginConformance.test_layout_refuses_other_sizes."""
    s.require("declare_layout")
    cut = [axis for axis, sizes in s.suite.sizes.items() if _cuts(s.layouts(sized(axis, sizes[0])), axis)]
    if not cut:
        nothing_to_judge(f"the layout cuts no parameter over {' or '.join(s.suite.sizes)}")
    for axis in cut:
        try:
            s.layouts(sized(axis, NO_DIVISOR))
        except CapabilityError as error:
            if f"{axis}={NO_DIVISOR}" not in str(error):
                broken(f"the error about {axis}={NO_DIVISOR} does not name it: {error}")
        except Exception as error:
            broken(
                f"{axis}={NO_DIVISOR} divides nothing, and raised {type(error).__name__}: {error}; expected a CapabilityError that names it"
            )
        else:
            broken(f"{axis}={NO_DIVISOR} divides nothing that the layout cuts with {axis}={s.suite.sizes[axis][0]}, and was accepted")


def _cuts(layouts: Layouts, axis: str) -> bool:
    return any(isinstance(layout.roles.get(axis), Shard) for layout in layouts.parameters.values())


def layout_is_repeatable(s: Subject) -> None:
    """See PluginConformance.test_layout_is_repeatable."""
    s.require("declare_layout")
    for plan in s.layout_plans():
        model = s.build_on("cpu")
        before = _seen(model)
        first, second = s.declared(plan, model), s.declared(plan, model)
        if first != second:
            broken(f"declare_layout answered differently when it was asked again under {plan.describe()}")
        after = _seen(model)
        changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        if changed:
            broken(f"declare_layout changed {changed[0]} of the model ({len(changed)} changes); it only looks at it")
        if s.declared(plan, s.build_on("meta")) != first:
            broken(f"declare_layout answers differently for the model on meta under {plan.describe()}; shapes and names have to be enough")


def _seen(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = sum(len(value) for key, value in vars(module).items() if key.endswith("_hooks") and value)
        forward = vars(module).get("forward")
        found[f"module {name or 'at the root'}"] = (type(module), module.training, hooks, forward, sorted(vars(module)))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        grad = None if tensor.grad is None else tensor.grad.sum().item()
        values = tensor.detach().double().sum().item() if tensor.device.type != "meta" else None
        found[name] = (id(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, grad, values, sorted(vars(tensor)))
    return found


@attrs.frozen(eq=False)
class _Filled:
    """What the hook answered, what it really filled, and the whole values."""

    answered: frozenset[str]
    changed: frozenset[str]
    values: Mapping[str, torch.Tensor]


def _fill(s: Subject, plan: ParallelPlan, seed: int) -> _Filled:
    """Place the model in one process and watch the plugin fill it; what it does not fill is left to the model's own code."""
    loaded, model = s.loaded, s.build_on("meta")
    layouts = s.layouts(plan, model, loaded)
    answered: set[str] = set()
    changed: set[str] = set()
    names = {id(module): logical_name(raw, layouts.transparent) for raw, module in model.named_modules()}

    def fill(module: nn.Module, mine: Layouts, of: int) -> frozenset[str]:
        before = {local: p.detach().clone() for local, p in module.named_parameters(recurse=False)}
        answer = loaded.ask_one(s.name, "init_params", model=module, layouts=mine, seed=of)
        if answer is not None and not isinstance(answer, (set, frozenset)):
            raise loaded.misanswered(s.name, "init_params", answer, "a set of names or None")
        answered.update(answer or ())
        for local, parameter in module.named_parameters(recurse=False):
            full = join(names[id(module)], local)
            if full in mine.parameters and not torch.equal(before[local].nan_to_num(7.5), parameter.detach().nan_to_num(7.5)):
                changed.add(full)
        return frozenset(answer or ())

    place_parameters(model, layouts, seed, torch.device("cpu"), lambda name, tensor: tensor, fill)
    values = {name: p.detach() for name, p in logical_parameters(model, layouts.transparent).items() if name in changed}
    return _Filled(frozenset(answered), frozenset(changed), values)


def init_names_what_it_fills(s: Subject) -> None:
    """See PluginConformance.test_init_names_what_it_fills."""
    s.require("init_params")
    found = _fill(s, ParallelPlan(), 1)
    unnamed, unfilled = sorted(found.changed - found.answered), sorted(found.answered - found.changed)
    if unnamed:
        broken(f"init_params filled {unnamed[0]} and did not name it ({len(unnamed)} such); the model's own code fills it again")
    if unfilled:
        broken(f"init_params named {unfilled[0]} and did not fill it ({len(unfilled)} such); it names what it filled and nothing else")
    if not found.answered:
        broken("init_params filled nothing of make_model(); let make_model() build a model that has what it fills")


def init_is_repeatable(s: Subject) -> None:
    """See PluginConformance.test_init_is_repeatable."""
    s.require("init_params")
    with _generators(1):
        first = _fill(s, ParallelPlan(), 1).values
    with _generators(2):
        second = _fill(s, ParallelPlan(), 1).values
    _require_equal(first, second, "when it was asked again with the same seed; a value depends on the seed and the name alone")


def init_follows_the_seed(s: Subject) -> None:
    """See PluginConformance.test_init_follows_the_seed."""
    s.require("init_params")
    first, second = _fill(s, ParallelPlan(), 1).values, _fill(s, ParallelPlan(), 2).values
    if all(torch.equal(first[name], second[name]) for name in first):
        broken(f"init_params fills {min(first)} ({len(first)} such) alike with seeds 1 and 2; draw from the seed, or exempt this check")


def init_leaves_global_generators(s: Subject) -> None:
    """See PluginConformance.test_init_leaves_global_generators."""
    s.require("init_params")
    with _generators(1):
        before = _states()
        _fill(s, ParallelPlan(), 1)
        after = _states()
    used = [name for name in before if before[name] != after[name]]
    if used:
        broken(
            f"init_params changed the global generator of {' and '.join(used)}; draw from torch's, which is seeded and put back around it"
        )


def init_ignores_the_plan(s: Subject) -> None:
    """See PluginConformance.test_init_ignores_the_plan."""
    s.require("init_params")
    if not s.suite.sizes:
        nothing_to_judge("`sizes` names no axis")
    whole = _fill(s, ParallelPlan(), 1).values
    for plan in s.layout_plans():
        _require_equal(whole, _fill(s, plan, 1).values, f"under {plan.describe()}; it fills whole tensors, which are cut afterwards")


def _require_equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], when: str) -> None:
    for name in sorted({*first, *second}):
        if name not in first or name not in second or not torch.equal(first[name], second[name]):
            broken(f"init_params fills {name} otherwise {when}")


@contextmanager
def _generators(seed: int) -> Iterator[None]:
    """Other states of the global generators, for a while."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global generator is what is looked at
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _states() -> dict[str, Any]:
    return {"torch": torch.get_rng_state().tolist(), "Python": random.getstate(), "NumPy": repr(np.random.get_state())}  # noqa: NPY002

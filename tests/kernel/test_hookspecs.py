"""The hooks: which there are, and that their documentation has all its parts."""

from __future__ import annotations

import inspect

import pytest

from mixle_core import hookimpl, hookspecs

HOOKS = {name: value for name, value in vars(hookspecs).items() if hasattr(value, "mixle_spec")}


def test_these_are_the_hooks_and_their_arguments():
    assert {name: tuple(inspect.signature(hook).parameters) for name, hook in HOOKS.items()} == {
        "declare_layout": ("model", "plan", "declared"),
        "own_axis": ("model", "plan", "layouts"),
        "own_reduction": ("model", "plan", "layouts"),
        "init_params": ("model", "layouts", "seed"),
        "save_state": ("model", "optimizers", "ownership"),
        "load_state": ("model", "optimizers", "ownership", "reader"),
        "build_model": ("spec",),
    }


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_when_with_what_and_shows_an_example(name):
    text = inspect.getdoc(HOOKS[name])
    first, *_ = text.splitlines()
    assert first.endswith(".")
    assert "Called" in text or "Asked" in text
    assert "Returns:" in text
    assert "Example: `" in text
    assert all(f"    {argument}: " in text for argument in inspect.signature(HOOKS[name]).parameters)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_a_signature_without_defaults_or_options(name):
    assert all(parameter.default is parameter.empty for parameter in inspect.signature(HOOKS[name]).parameters.values())
    assert HOOKS[name].mixle_spec == {"firstresult": False, "historic": False, "warn_on_impl": None, "warn_on_impl_args": None}
    assert HOOKS[name](*[None] * len(inspect.signature(HOOKS[name]).parameters)) is None


def test_an_implementation_is_marked_for_this_project():
    @hookimpl
    def own_axis(plan):
        return plan

    assert hookspecs.PROJECT == "mixle"
    assert not any(own_axis.mixle_impl.values())
    assert own_axis("unchanged") == "unchanged"

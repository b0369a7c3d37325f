"""Finding, loading and asking plugins, with real distributions on `sys.path`."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from structlog.testing import capture_logs

from mixle_core import PluginError, hookimpl, installed_plugins, load_plugins
from mixle_core.plugins import InstalledPlugin, allowed_by_environment

QUIET = """
from mixle_core import hookimpl

@hookimpl
def build_model(spec):
    return (__name__, spec)
"""
FAILS = "raise RuntimeError('no such device')"


def listed() -> list[tuple[str, bool]]:
    """Names and whether they are enabled."""
    return [(plugin.name, plugin.enabled) for plugin in installed_plugins()]


def test_listing_reads_the_metadata_and_imports_nothing(site):
    site.install("beta", FAILS, version="2.5")
    site.install("alpha", FAILS, distribution="Some-Dist", module="some_module_under_test")
    before = set(sys.modules)
    found = installed_plugins()
    assert found == (
        InstalledPlugin(name="alpha", distribution="Some-Dist", version="1.0", value="some_module_under_test", enabled=True),
        InstalledPlugin(name="beta", distribution="mixle-beta", version="2.5", value="mixle_beta_under_test", enabled=True),
    )
    assert [plugin.label() for plugin in found] == ["alpha (Some-Dist 1.0)", "beta (mixle-beta 2.5)"]
    assert {name for name in set(sys.modules) - before if name.endswith("_under_test")} == set()


def test_an_environment_without_plugins_is_an_empty_list(site):
    assert installed_plugins() == ()
    loaded = load_plugins()
    assert (dict(loaded.labels), loaded.versions, dict(loaded.broken)) == ({}, (), {})


@pytest.mark.parametrize(
    ("listed_names", "enabled"),
    [("alpha", {"alpha"}), ("beta, alpha", {"alpha", "beta"}), (" alpha ,,", {"alpha"}), ("", set()), (" , ", set())],
)
def test_the_allow_list_narrows_what_is_listed_and_loaded(site, monkeypatch, listed_names, enabled):
    for name in ("alpha", "beta", "gamma"):
        site.install(name, QUIET)
    monkeypatch.setenv("MIXLE_PLUGINS", listed_names)
    assert listed() == [(name, name in enabled) for name in ("alpha", "beta", "gamma")]
    modules = {f"mixle_{name}_under_test" for name in enabled}
    assert set(load_plugins().labels) == enabled
    assert {name for name in sys.modules if name.endswith("_under_test")} == modules


def test_without_the_variable_everything_is_allowed(site):
    site.install("alpha", QUIET)
    assert allowed_by_environment() is None
    assert listed() == [("alpha", True)]


def test_a_name_in_the_allow_list_that_is_not_installed_is_refused(site, monkeypatch):
    site.install("alpha", QUIET)
    monkeypatch.setenv("MIXLE_PLUGINS", "alpha,alhpa")
    with pytest.raises(PluginError) as caught:
        load_plugins()
    assert str(caught.value) == (
        "no plugin named 'alhpa' is installed (did you mean 'alpha'?); "
        "way out: pip install mixle-alhpa, or `mixle plugins` lists what is there"
    )


def test_two_distributions_with_one_name_are_refused_with_both(add_site):
    for place in ("one", "two"):
        add_site(place).install("alpha", QUIET, distribution=f"mixle-{place}", version="1.2")
    with pytest.raises(PluginError) as caught:
        installed_plugins()
    # the order in which directories are searched decides who comes first
    assert str(caught.value) == (
        "two distributions register the plugin 'alpha': mixle-two 1.2 and mixle-one 1.2; way out: uninstall one of them"
    )
    with pytest.raises(PluginError, match="two distributions register the plugin 'alpha'"):
        load_plugins([])


def test_one_distribution_found_twice_is_one_plugin(add_site):
    for place in ("one", "two"):
        add_site(place).install("alpha", QUIET)
    assert listed() == [("alpha", True)]


def test_a_broken_plugin_that_nobody_asked_for_is_shown_and_skipped(site):
    site.install("broken", FAILS)
    site.install("sound", QUIET)
    with capture_logs() as logs:
        loaded = load_plugins()
    reason = (
        "plugin broken (mixle-broken 1.0) failed to import: RuntimeError: no such device; "
        "way out: repair it, or leave it out of MIXLE_PLUGINS"
    )
    assert dict(loaded.broken) == {"broken": reason}
    assert dict(loaded.labels) == {"sound": "sound (mixle-sound 1.0)"}
    assert "broken" not in loaded
    assert "sound" in loaded
    assert logs == [{"event": "plugin_broken", "log_level": "warning", "plugin": "broken", "reason": reason}]


def test_a_plugin_that_refuses_to_be_imported_is_broken_too(site):
    site.install("old", "from mixle_core import CapabilityError\nraise CapabilityError('needs a newer library')")
    assert "CapabilityError: needs a newer library" in load_plugins().broken["old"]
    with pytest.raises(PluginError, match=r"^plugin old \(mixle-old 1.0\) failed to import: CapabilityError: needs a newer library; "):
        load_plugins(["old"])


def ask_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_plugins([name])


def ask_by_requirement(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_plugins(required=[name])


def ask_by_allow_list(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MIXLE_PLUGINS", name)
    return load_plugins()


ASKING = pytest.mark.parametrize("ask", [ask_by_name, ask_by_requirement, ask_by_allow_list])


@ASKING
def test_a_broken_plugin_that_was_asked_for_is_an_error_with_its_label(site, monkeypatch, ask):
    site.install("broken", FAILS, version="0.3")
    with pytest.raises(PluginError) as caught:
        ask("broken", monkeypatch)
    assert str(caught.value) == (
        "plugin broken (mixle-broken 0.3) failed to import: RuntimeError: no such device; way out: repair it, "
        "or leave it out of MIXLE_PLUGINS"
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


@ASKING
def test_a_missing_dependency_of_a_plugin_names_the_plugin(site, monkeypatch, ask):
    site.install("broken", "import a_module_that_is_not_there")
    with pytest.raises(PluginError, match=r"^plugin broken \(mixle-broken 1.0\) failed to import: ModuleNotFoundError: No module named"):
        ask("broken", monkeypatch)


@ASKING
def test_a_plugin_that_is_not_installed_is_refused(site, monkeypatch, ask):
    with pytest.raises(PluginError) as caught:
        ask("gone", monkeypatch)
    assert str(caught.value) == (
        "no plugin named 'gone' is installed; way out: pip install mixle-gone, or `mixle plugins` lists what is there"
    )


@pytest.mark.parametrize("ask", [ask_by_name, ask_by_requirement])
def test_a_plugin_that_the_allow_list_leaves_out_cannot_be_asked_for(site, monkeypatch, ask):
    site.install("alpha", QUIET)
    monkeypatch.setenv("MIXLE_PLUGINS", "")
    with pytest.raises(PluginError) as caught:
        ask("alpha", monkeypatch)
    assert str(caught.value) == "plugin 'alpha' is asked for but MIXLE_PLUGINS leaves it out; way out: add it to MIXLE_PLUGINS"


def test_a_list_in_code_loads_these_and_no_others(site):
    for name in ("alpha", "beta", "gamma"):
        site.install(name, QUIET)
    assert list(load_plugins(["gamma", "alpha"]).labels) == ["alpha", "gamma"]
    assert list(load_plugins([]).labels) == []
    assert "mixle_beta_under_test" not in sys.modules


def test_plugins_are_asked_in_name_order_whatever_the_path_says(add_site):
    early, late = add_site("early"), add_site("late")
    early.install("charlie", QUIET)
    early.install("alpha", QUIET)
    late.install("bravo", QUIET)
    late.install("delta", QUIET)
    loaded = load_plugins()
    assert loaded.ask("build_model", spec="x") == [
        (name, (f"mixle_{name}_under_test", "x")) for name in ("alpha", "bravo", "charlie", "delta")
    ]
    assert [name for name, _ in loaded.versions] == ["alpha", "bravo", "charlie", "delta"]


def test_names_and_versions_of_what_was_loaded_are_known(site):
    site.install("beta", QUIET, version="2.0")
    loaded = load_plugins(extra={"alpha": types.ModuleType("alpha")})
    assert loaded.versions == (("alpha", "in code"), ("beta", "2.0"))
    assert dict(loaded.labels) == {"alpha": "alpha (passed in code)", "beta": "beta (mixle-beta 2.0)"}


class Answers:
    """A plugin as an object: one answer for `build_model`."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def build_model(self) -> Any:
        return self.answer


def test_a_plugin_in_code_takes_the_place_of_the_installed_one(site):
    site.install("alpha", FAILS)
    loaded = load_plugins(extra={"alpha": Answers(1)})
    assert loaded.ask("build_model", spec="x") == [("alpha", 1)]
    assert dict(loaded.broken) == {}


def test_none_means_not_mine_and_other_empty_answers_count(site):
    loaded = load_plugins(extra={"a": Answers(None), "b": Answers(0), "c": Answers(frozenset()), "d": types.ModuleType("d")})
    assert loaded.ask("build_model", spec="x") == [("b", 0), ("c", frozenset())]
    assert loaded.ask_one("a", "build_model", spec="x") is None
    assert loaded.ask_one("b", "build_model", spec="x") == 0
    assert loaded.ask_one("d", "build_model", spec="x") is None


def contract(source: str, site: Any) -> str:
    """The text with which a plugin of this source is refused."""
    site.install("alpha", f"from mixle_core import hookimpl\n{source}")
    assert "breaks the contract of the hooks" in load_plugins().broken["alpha"]  # nobody asked for it
    with pytest.raises(PluginError) as caught:
        load_plugins(["alpha"])
    text = str(caught.value)
    assert text.startswith("plugin alpha (mixle-alpha 1.0) breaks the contract of the hooks")
    assert text.endswith("way out: correct the plugin, or leave it out of MIXLE_PLUGINS")
    return text


def test_a_misspelt_hook_is_refused_with_the_nearest(site):
    text = contract("@hookimpl\ndef declare_layuot(model): ...", site)
    assert "hook 'declare_layuot' does not exist; the nearest is 'declare_layout'" in text


def test_an_argument_with_a_default_is_refused(site):
    text = contract("@hookimpl\ndef own_axis(plan, layouts=None): ...", site)
    assert "hook 'own_axis' gives 'layouts' a default; take it without one" in text


@pytest.mark.parametrize("option", ["wrapper", "hookwrapper", "tryfirst", "trylast", "optionalhook"])
def test_order_and_wrappers_are_refused(site, option):
    body = "yield" if "wrapper" in option else "return None"
    text = contract(f"@hookimpl({option}=True)\ndef own_axis(plan): {body}", site)
    assert f"hook 'own_axis' uses {option}; hooks have no order and no wrappers" in text


def test_another_name_than_the_function_is_refused(site):
    text = contract("@hookimpl(specname='own_axis')\ndef build_model(plan): ...", site)
    assert "hook 'build_model' uses specname; hooks have no order and no wrappers" in text


@pytest.mark.parametrize(("signature", "argument"), [("plan, world", "world"), ("*plans", "plans"), ("plan, **rest", "rest")])
def test_an_unknown_argument_is_refused_with_the_known_ones(site, signature, argument):
    text = contract(f"@hookimpl\ndef own_axis({signature}): ...", site)
    assert f"hook 'own_axis' takes '{argument}'; it may take model, plan, layouts" in text


def test_all_faults_of_a_plugin_are_told_at_once(site):
    source = """
@hookimpl
def own_axs(plan): ...

@hookimpl(tryfirst=True)
def own_reduction(plan, layouts=None, world=1): ...
"""
    assert contract(source, site) == (
        "plugin alpha (mixle-alpha 1.0) breaks the contract of the hooks\n"
        "  hook 'own_axs' does not exist; the nearest is 'own_axis'\n"
        "  hook 'own_reduction' uses tryfirst; hooks have no order and no wrappers\n"
        "  hook 'own_reduction' gives 'layouts' a default; take it without one\n"
        "  hook 'own_reduction' takes 'world'; it may take model, plan, layouts\n"
        "way out: correct the plugin, or leave it out of MIXLE_PLUGINS"
    )


def test_the_contract_holds_for_objects_passed_in_code(site):
    class Wrong:
        @hookimpl
        def build_model(self, spec: str, size: int = 1) -> None: ...

    with pytest.raises(PluginError) as caught:
        load_plugins(extra={"mine": Wrong()})
    assert str(caught.value) == (
        "plugin mine (passed in code) breaks the contract of the hooks: hook 'build_model' takes 'size'; it may take spec; "
        "way out: correct the plugin, or leave it out of MIXLE_PLUGINS"
    )


def test_functions_without_the_mark_are_the_plugins_own(site):
    site.install("alpha", "def own_axis(plan, anything=1): ...\ndef helper(): ...")
    assert load_plugins().ask("own_axis", model=None, plan=None, layouts=None) == []

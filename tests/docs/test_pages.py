"""What the pages say about hooks, errors and public names is complete and agrees with the code."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from mixle_core import errors, hookspecs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, f"{hookspecs.PROJECT}_spec")}
ERRORS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MixleError)}
SOURCES = "\n".join(file.read_text() for part in ("mixle_core", "plugins") for file in sorted((ROOT / part).rglob("*.py")))
RENDERED = ("mixle_core", "mixle_core.runtime", "mixle_core.checkpoint", "mixle_core.audit", "mixle_core.testing", "mixle_lm")


def sections(text: str, level: str = "##") -> dict[str, str]:
    """Heading -> text below it."""
    parts = re.split(rf"^{level} (.*)$", re.sub(r"^#(?= )", "", text, count=1), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_each_hook_has_a_page_and_each_page_a_hook():
    pages = {page.stem for page in (DOCS / "hooks").glob("*.md")} - {"index"}
    assert pages == set(HOOKS)
    index = (DOCS / "hooks" / "index.md").read_text()
    assert [name for name in HOOKS if f"`{name}`]({name}.md)" not in index] == []


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_the_page_of_a_hook_agrees_with_its_signature(hook):
    page = (DOCS / "hooks" / f"{hook}.md").read_text()
    assert page.startswith(f"# {hook}\n")
    found = sections(page)
    assert list(found) == ["Arguments", "Answer", "Errors", "Example"]
    named = re.findall(r"^\| `(\w+)` \|", found["Arguments"], re.MULTILINE)
    assert named == list(inspect.signature(HOOKS[hook]).parameters)
    assert "**When.**" in page
    assert "**On which ranks.**" in page
    assert "`None` declines" in " ".join(found["Answer"].split())
    assert f"def {hook}(" in found["Example"]


def test_each_error_has_a_section_that_produces_it():
    found = sections((DOCS / "errors.md").read_text())
    assert [name for name in ERRORS if name not in found] == []
    produced = {name: f"raises: {name}" in found[name] and "**Way out:**" in found[name] for name in ERRORS if name != "MixleError"}
    assert [name for name, shown in produced.items() if not shown] == []


def test_the_messages_of_the_table_are_those_of_the_code():
    table = sections((DOCS / "errors.md").read_text())["From message to way out"]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    assert len(messages) > 20
    assert [message for message in messages if message not in SOURCES] == []


@pytest.mark.parametrize("package", RENDERED)
def test_every_public_name_is_rendered(package):
    directives = re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(directives) == len(set(directives))
    rendered = {name.rpartition(".")[2] for name in directives if name.rpartition(".")[0] == package}
    public = set(importlib.import_module(package).__all__)
    again = {name for name in public if package == "mixle_core.runtime" and f"mixle_core.{name}" in directives}
    assert rendered | again == public


@pytest.mark.parametrize("package", RENDERED)
def test_every_public_name_has_a_docstring(package):
    module = importlib.import_module(package)
    bare = []
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.isclass(found) or inspect.isfunction(found):
            if not found.__doc__:
                bare.append(name)
            for member, value in vars(found).items() if inspect.isclass(found) else ():
                function = value.fget if isinstance(value, property) else value
                if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                    bare.append(f"{name}.{member}")
    assert bare == []


def test_every_hook_of_a_plugin_is_rendered():
    page = (DOCS / "api.md").read_text()
    environment = (ROOT / "tox.ini").read_text().partition("[testenv:docs]")[2].partition("\n[")[0]
    answers = {}
    for plugin in re.findall(r"plugins/([\w-]+)", environment):
        for file in (ROOT / "plugins" / plugin / "src").glob("*/plugin.py"):
            answers[file.parent.name] = re.findall(r"^@hookimpl\ndef (\w+)", file.read_text(), re.MULTILINE)
    assert len(answers) > 3
    missing = [f"{name}.plugin.{hook}" for name, hooks in answers.items() for hook in hooks]
    assert [name for name in missing if f".. autofunction:: {name}\n" not in page] == []


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in DOCS.rglob("*.md"):
        for body in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            lines = [line for line in body.splitlines() if line and not line.startswith(":")]
            listed |= {found.with_suffix("").resolve() for line in lines for found in page.parent.glob(f"{line}.md")}
    pages = {page.with_suffix("").resolve() for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert pages - listed == {(DOCS / "index").resolve()}

"""Every block of the documentation runs as it stands there, and prints what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mixle_core.testing import run_ranks

from . import blocks as b

PAGES = {page.relative_to(b.DOCS).as_posix(): b.read_blocks(page) for page in b.PAGES}
EVERY = [block for found in PAGES.values() for block in found]
CHAINS = [chain for found in PAGES.values() for chain in b.chains(found)]
CONSOLE = [block for block in EVERY if block.language == "console"]
DATA = [block for block in EVERY if block.language in ("toml", "yaml", "json")]
OPTIONS = {"ranks", "continues", "raises", "file", "exit"}


@pytest.fixture(scope="session")
def directories(tmp_path_factory):
    """A directory for each page, with its files in it."""
    made: dict[str, Path] = {}

    def directory(page: str) -> Path:
        if page not in made:
            made[page] = tmp_path_factory.mktemp(page.replace("/", "-").removesuffix(".md"))
            b.prepare(made[page], PAGES[page])
        return made[page]

    return directory


def test_every_block_is_of_a_kind_that_is_run():
    known = {"python", "console", "toml", "yaml", "json"}
    odd = [f"{block}: {block.language!r}" for block in EVERY if block.language not in known and not block.language.startswith("{")]
    assert odd == []
    assert [str(block) for block in EVERY if not set(block.options) <= OPTIONS] == []


def test_no_fence_is_overlooked():
    for page in b.PAGES:
        fences = len(re.findall(r"^ *(?:```|~~~)", page.read_text(), re.MULTILINE))
        shown = b.read_blocks(page)
        assert fences == 2 * (len(shown) + sum(block.output is not None for block in shown)), page.name


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_python(chain, directories):
    first = chain.blocks[0]
    directory, installed = directories(first.page), b.has_installed(PAGES[first.page], first.line)
    sources = [(f"{block}", block.text, block.options.get("raises", "")) for block in chain.blocks]
    outcomes = run_ranks(b.run_python, chain.ranks, str(directory), sources, chain.ranks, installed, timeout_s=240)
    for index, block in enumerate(chain.blocks):
        printed = "".join(outcome.value[index] for outcome in outcomes)
        if block.output is not None:
            assert b.agrees(block.output, printed), f"{block} shows\n{block.output}\nand printed\n{printed}"
        else:
            assert not printed.strip(), f"{block} printed, and the page does not show it:\n{printed}"


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_console(block, directories, python):
    directory, installed = directories(block.page), b.has_installed(PAGES[block.page], block.line)
    printed = ""
    for command in b.commands(block):
        if not b.is_run(command):
            require_known(command)
            continue
        done = b.run_command(directory, command, python, installed=installed)
        printed += done.stdout + done.stderr
        assert done.returncode == int(block.options.get("exit", "0")), f"{command}\n{done.stdout}\n{done.stderr}"
    if block.output is not None:
        assert b.agrees(block.output, printed), f"{block} shows\n{block.output}\nand printed\n{printed}"


def require_known(command: str) -> None:
    """What installs and runs the tests cannot be run by a test: continuous integration runs it, so compare it with tox.ini."""
    tox = (b.ROOT / "tox.ini").read_text()
    if b.installs_the_project(command):
        environment = tox.partition("[testenv:docs]")[2].partition("\n[")[0]
        for target in re.findall(r"-e '?([^' ]+)'?", command):
            place = target.partition("[")[0]
            assert (b.ROOT / place / "pyproject.toml").is_file(), command
            assert place == "." or f"-e {{tox_root}}/{place}" in environment, command
        return
    assert b.program(command) in ("tox", "python3.11", "."), f"{command}: not a command that runs"
    if b.program(command) != "tox":
        assert command in ("python3.11 -m venv .venv", ". .venv/bin/activate"), command
    for environment in re.findall(r"tox -e (\S+)", command):
        assert f"[testenv:{environment}]" in tox, command


@pytest.mark.parametrize("block", DATA, ids=str)
def test_data(block):
    b.parse(block)


def test_a_file_of_a_page_is_used_on_that_page():
    for page, found in PAGES.items():
        for block in found:
            name = block.options.get("file")
            if name and name != "pyproject.toml":
                elsewhere = " ".join(other.text for other in found if other is not block)
                parts = Path(name).with_suffix("").parts
                assert any(part in elsewhere for part in (*parts, parts[-1].removeprefix("test_"))), f"{page}: {name}"


def test_every_linked_file_exists():
    for page in b.PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)\)", text):
            assert (page.parent / target).resolve().exists(), f"{page.name}: {target}"


def test_numbers_agree_up_to_their_last_digit():
    assert b.agrees("loss 1.234, 12 tokens", "loss 1.235, 12 tokens\n")
    assert not b.agrees("loss 1.234, 12 tokens", "loss 1.237, 12 tokens")
    assert not b.agrees("loss 1.234, 12 tokens", "loss 1.234, 13 tokens")
    assert b.agrees("a\n...\nz 1.0", "a\nb\nc\nz 1.0")
    assert b.agrees("a\n...\n", "a\nb\nc")
    assert b.agrees("a\n...\n", "a")
    assert b.agrees("...\nz", "a\nb\nz")
    assert b.agrees("...\nz", "z")
    assert b.agrees("loss 2... nats, 4 of 1,234", "loss 2.86 nats, 4 of 1,234")
    assert not b.agrees("loss 2... nats", "loss 3.86 nats")
    assert b.agrees("took ... s", "took 3.2 s")
    assert not b.agrees("a\nz", "a\nb\nz")

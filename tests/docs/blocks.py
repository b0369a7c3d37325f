"""Reading the blocks of a page, running them, and comparing what they print with what the page shows.

A comment before a block says how it runs:

    <!-- ranks: 2 -->          on so many gloo ranks, launched as torchrun launches them
    <!-- continues -->         in the namespace of the block before it
    <!-- raises: PlanError --> ends with this error; its text belongs to the output
    <!-- file: loop.py -->     is not run but written into the page's directory, where other blocks find it
    <!-- exit: 1 -->           of console blocks, where it is not 0

A `text` block shows the output of the block before it. `...` stands for any text; decimal numbers may differ in their last digit.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
SITE = "site"
"""Directory of a page into which its `pip install` commands install."""

_BLOCK = re.compile(r"((?:^<!--[^\n]*-->\n)*)^(`{3,})([^\s`]*)[^\n]*\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
_PROGRAMS = ("mixle", "torchrun", "python", "pytest", "grep", "cmp", "head")


@attrs.frozen
class Block:
    """One fenced block: its language, what the comments before it say, and its text."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    text: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page.removesuffix('.md')}:{self.line}"


def read_blocks(path: Path) -> list[Block]:
    """The blocks of a page in order; a `text` block becomes the output of the block before it."""
    page, source = path.relative_to(DOCS).as_posix(), path.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(source):
        comments, _, language, text = match.groups()
        line = source.count("\n", 0, match.start(2)) + 1
        options = {}
        for comment in re.findall(r"<!--(.*?)-->", comments):
            for item in filter(None, map(str.strip, comment.split(","))):
                key, _, value = item.partition(":")
                options[key.strip()] = value.strip()
        if language == "text" and "file" not in options:
            assert found, f"{page}:{line}: a text block shows the output of a block before it"
            assert found[-1].output is None, f"{page}:{line}: the block before it has an output already"
            found[-1] = attrs.evolve(found[-1], output=text)
        else:
            found.append(Block(page, line, language, options, text))
    return found


@attrs.frozen
class Chain:
    """Python blocks that share a namespace, and the number of ranks they run on."""

    blocks: tuple[Block, ...]

    @property
    def ranks(self) -> int:
        """As the first block says."""
        return int(self.blocks[0].options["ranks"])

    def __str__(self) -> str:
        return f"{self.blocks[0]}x{self.ranks}"


def chains(blocks: list[Block]) -> list[Chain]:
    """The python blocks that run, each with those that continue it."""
    found: list[list[Block]] = []
    for block in blocks:
        if block.language != "python" or "file" in block.options:
            continue
        if "continues" in block.options:
            assert found, f"{block}: continues nothing"
            found[-1].append(block)
        else:
            assert "ranks" in block.options, f"{block}: say on how many ranks it runs: <!-- ranks: N -->"
            found.append([block])
    return [Chain(tuple(chain)) for chain in found]


def commands(block: Block) -> list[str]:
    """The command lines of a console block, continued ones joined."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def program(command: str) -> str:
    """The program that a command line starts, behind its variables."""
    return next(word for word in shlex.split(command) if not re.match(r"\w+=", word))


def is_run(command: str) -> bool:
    """Whether a console command is run here; installing the project and running tox is not: that is what runs this."""
    return program(command) in _PROGRAMS and not installs_the_project(command)


def installs_the_project(command: str) -> bool:
    """Whether a command installs mixle's own distributions, as the test environment did."""
    return "pip install" in command and re.search(r"-e '?(\.\[|plugins/)", command) is not None


def agrees(shown: str, printed: str) -> bool:
    """Whether `printed` is what the page shows."""
    pattern, numbers, at = "", [], 0
    shown = _tidy(shown)
    for match in re.finditer(rf"\n *\.\.\.$|\.\.\.|{_NUMBER.pattern}(?!\.\.\.)", shown, re.MULTILINE):
        pattern += re.escape(shown[at : match.start()])
        at = match.end()
        if match[0].startswith("\n"):  # a line of its own stands for any number of lines
            pattern += r"(?:\n.*)*?"
        elif at == len("...") and shown.startswith("...\n"):
            pattern, at = r"(?:.*\n)*?", at + 1
        elif match[0] == "...":
            pattern += r".*?"
        else:
            numbers.append(match[0])
            pattern += r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
    pattern += re.escape(shown[at:])
    found = re.fullmatch(pattern, _tidy(printed))
    return found is not None and all(_close(*pair) for pair in zip(numbers, found.groups(), strict=True))


def _tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def _close(shown: str, printed: str) -> bool:
    mantissa, _, exponent = shown.partition("e")
    if "." not in mantissa and not exponent:
        return shown == printed
    step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(shown) - float(printed)) <= 1.01 * step


def run_python(directory: str, sources: list[tuple[str, str, str]], ranks: int, installed: bool) -> list[str]:
    """Run the blocks of a chain in this process, as one rank of a script; return what each printed.

    Args:
        sources: (label, source, name of the error it ends with or "") of each block.
        installed: whether the page has installed its own distributions by then.
    """
    os.chdir(directory)
    sys.path[:0] = [directory, f"{directory}/{SITE}"] if installed else [directory]
    keep = _launched_as_by_torchrun() if ranks > 1 else None
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    printed = []
    for label, source, raises in sources:
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(source, label, "exec"), main.__dict__)
            except Exception as error:
                if type(error).__name__ != raises:
                    raise
                if os.environ.get("RANK", "0") == "0":  # the others say the same
                    print(f"{raises}: {error}")
            else:
                assert not raises, f"{label} ended without {raises}"
        printed.append(out.getvalue())
    if keep is not None:
        _wait_for_the_others(keep)
    return printed


def _launched_as_by_torchrun() -> Any:
    """Leave the process group of the test pool, and set the environment in which torchrun starts a script."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False) if rank == 0 else None
    port: list[Any] = [store.port if store else None]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    if store is None:
        store = dist.TCPStore("localhost", port[0], None, is_master=False)
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port[0]}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ.update(MASTER_ADDR="localhost", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    return store


def _wait_for_the_others(store: Any) -> None:
    """The first rank holds the store: it leaves last."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"docs/left/{rank}", "1")
    if rank == 0:
        store.wait([f"docs/left/{other}" for other in range(world)])


def prepare(directory: Path, blocks: list[Block]) -> None:
    """Write the files of a page and install what its commands install, once for each page."""
    done = directory / ".prepared"
    if done.exists():
        return
    for block in blocks:
        if "file" in block.options:
            target = directory / block.options["file"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
    for block in blocks:
        for command in commands(block) if block.language == "console" else []:
            if "pip install" in command and not installs_the_project(command):
                _install(directory, command)
    done.touch()


def _install(directory: Path, command: str) -> None:
    """`pip install` into the page's own directory, with the build backend of this environment and without an index."""
    _, _, what = command.partition("pip install")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--target", SITE]
    packages = [word for word in shlex.split(what) if word != "-e"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], cwd=directory, check=True)


def has_installed(blocks: list[Block], line: int) -> bool:
    """Whether a page has installed its own distributions before or at `line`."""
    return any(
        block.language == "console" and block.line <= line and "pip install" in block.text and not installs_the_project(block.text)
        for block in blocks
    )


def run_command(directory: Path, command: str, python: Path, *, installed: bool) -> subprocess.CompletedProcess[str]:
    """Run a console command in the page's directory; what it writes to stderr follows what it writes to stdout.

    `python` is the program that stands for the interpreter, see `ahead`.
    """
    here = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(python.parent), str(here), os.environ["PATH"]]),
        "PYTHONPATH": f"{directory / SITE}" if installed else "",
        "OMP_NUM_THREADS": "1",
        "PET_STANDALONE": "1",  # torchrun takes a free port
    }
    if "pip install" in command:
        command = "true"  # done by `prepare`
    for script, module in (("torchrun", "torch.distributed.run"), ("pytest", "pytest")):  # an environment may share the module alone
        command = re.sub(rf"^{script} ", f"python -m {module} ", command)
    command = re.sub(r"^((?:\w+=\S* )*)mixle ", rf"\1python {here}/mixle ", command)
    return subprocess.run(
        command, shell=True, executable="/bin/bash", cwd=directory, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def parse(block: Block) -> None:
    """Parse a block of data."""
    if block.language == "toml":
        tomllib.loads(block.text)
    else:
        import yaml

        yaml.safe_load(block.text)  # JSON too

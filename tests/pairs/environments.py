"""Wheels, and environments that see the third-party packages of this one and of mixle nothing but what pip installed there."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from .third_party import DISTRIBUTIONS, write_project

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NATIVE = ("dtensor-tp", "qwen3", "torch-ddp", "torch-fsdp2")
CORE = "mixle-core"
SOURCES = {CORE: ROOT, **{file.parent.name: file.parent for file in sorted((ROOT / "plugins").glob("mixle-*/pyproject.toml"))}}
"""Every distribution of this repository, and where it is built from."""
PIP = ("-I", "-m", "pip", "--disable-pip-version-check", "--no-input")
BUILD = """
import os, sys
from pathlib import Path
from hatchling.build import build_wheel
into = sys.argv[1]
for project in sys.argv[2:]:
    os.chdir(project)
    build_wheel(into)
"""


def user_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what a test runner, a virtual environment or mixle put there."""
    foreign = ("PYTHON", "PYTEST", "PIP_", "TOX", "VIRTUAL_ENV", "MIXLE", "COV", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return kept | quiet | {"PIP_CONFIG_FILE": os.devnull} | (extra or {})


def checked(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that has to work."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300, env=user_environment(), **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def build_wheels(into: Path) -> Path:
    """Build mixle's own distributions as a release does, and the third-party ones of these tests."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", into / "wheels")
    checked([sys.executable, *PIP, "wheel", *options, *SOURCES.values()], cwd=into)
    projects = [write_project(into / "projects", facts) for facts in DISTRIBUTIONS]
    checked([sys.executable, "-I", "-c", BUILD, into / "wheels", *projects], cwd=into)
    return into / "wheels"


def link_packages(into: Path, only: Iterable[str] | None = None) -> Path:
    """Link the installed third-party packages into one folder, and nothing of mixle, editable or not.

    Args:
        only: distributions to link; None links whatever is installed here, also in a shared environment on the path.
    """
    into.mkdir()
    sites = [Path(entry) for entry in sys.path if Path(entry).name == "site-packages"]
    wanted = None if only is None else {file.parts[0] for name in only for file in distribution(name).files or ()}
    for entry in (entry for site in sites for entry in sorted(site.iterdir())):
        ours = entry.name.startswith(("mixle", "_editable_impl_mixle", "__pycache__")) or entry.suffix == ".pth"
        if not ours and (wanted is None or entry.name in wanted) and not (into / entry.name).exists():
            (into / entry.name).symlink_to(entry)
    return into


class Environment:
    """A virtual environment with a Python of its own, as a user makes one."""

    def __init__(self, path: Path, packages: Path, wheels: Path, starter: Starter | None = None) -> None:
        self.path = path
        self.wheels = wheels
        self.starter = starter
        self.desk = path / "desk"
        venv.create(path, with_pip=False, symlinks=True)
        self.desk.mkdir()
        self.python = path / "bin" / "python"
        (self.site,) = path.glob("lib/python3*/site-packages")
        (self.site / "third_party.pth").write_text(f"{packages}\n")
        self._probe: Probe | None = None

    def pip(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run pip in the environment, without an index."""
        return self.run(self.python, *PIP, *arguments, check=check)

    def install(self, *requirements: str, resolve: bool = False, target: Path | None = None) -> Environment:
        """Install wheels; `resolve` also looks at what they require, which takes some seconds.

        Args:
            target: a folder to install into instead, to be put on the path.
        """
        options = ["--quiet", "--no-index", "--no-compile", "--find-links", str(self.wheels)]
        options += [] if resolve else ["--no-deps"]
        options += ["--target", str(target)] if target else []
        self.pip("install", *options, *requirements)
        self.forget()
        return self

    def uninstall(self, *names: str) -> None:
        """Remove distributions."""
        self.pip("uninstall", "--quiet", "--yes", *names)
        self.forget()

    def run(
        self, *command: str | Path, check: bool = True, timeout: float = 240, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command from a folder of the environment."""
        words = [*map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout, cwd=self.desk, env=user_environment(env))
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def mixle(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the installed `mixle`; keywords become environment variables."""
        return self.run(self.path / "bin" / "mixle", *arguments, check=False, env=env)

    def states(self, *arguments: str, code: int = 0, **env: str) -> dict[str, str]:
        """Name -> state as `mixle plugins --json` tells it, after checking its exit code."""
        done = self.mixle("plugins", "--json", *arguments, **env)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return {row["name"]: row["state"] for row in json.loads(done.stdout)}

    def probe(self) -> Probe:
        """A new process that sees what this environment has installed."""
        assert self.starter is not None
        return self.starter.fork(self)

    def ask(self, kind: str, **question: Any) -> dict[str, Any]:
        """Ask a process of this environment; see `probe.py` for the kinds."""
        self._probe = self._probe or self.probe()
        return self._probe.ask(kind, **question)

    def forget(self) -> None:
        """End that process: what is installed has changed."""
        if self._probe:
            self._probe.close()
        self._probe = None


class Probe:
    """The near end of a process that answers one JSON line with another."""

    def __init__(self, connection: socket.socket, errors: Path) -> None:
        self._connection = connection
        self._lines = connection.makefile("rw")
        self._errors = errors

    def send(self, kind: str, **question: Any) -> None:
        """Ask without waiting."""
        self._lines.write(json.dumps({"kind": kind, **question}) + "\n")
        self._lines.flush()

    def receive(self, timeout: float = 120) -> dict[str, Any]:
        """The next answer."""
        self._connection.settimeout(timeout)
        line = self._lines.readline()
        assert line, f"the process ended without an answer:\n{self._errors.read_text()[-3000:]}"
        return json.loads(line)

    def ask(self, kind: str, **question: Any) -> dict[str, Any]:
        """Ask and wait."""
        self.send(kind, **question)
        return self.receive()

    def close(self) -> None:
        """The process ends when its connection does."""
        self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


class Starter:
    """A process that imported torch and transformers, and nothing of mixle. Every probe is a fork of it."""

    def __init__(self, bare: Environment) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pairs"))
        shutil.copy(HERE / "probe.py", self._folder / "probe.py")
        command = [bare.python, "-I", self._folder / "probe.py"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, cwd=self._folder, env=user_environment())
        self._count = 0

    def fork(self, environment: Environment) -> Probe:
        """Start a probe whose path ends with what is installed in `environment`."""
        self._count += 1
        address = self._folder / f"{self._count}"
        request = {
            "address": str(address),
            "prefix": str(environment.path),
            "python": str(environment.python),
            "site": str(environment.site),
            "desk": str(environment.desk),
            "errors": str(address.with_suffix(".err")),
            "checkout": str(ROOT),
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(1)
            listener.settimeout(120)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            connection, _ = listener.accept()
        return Probe(connection, address.with_suffix(".err"))

    def close(self) -> None:
        """End the process; its forks end with their connections."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        shutil.rmtree(self._folder, ignore_errors=True)

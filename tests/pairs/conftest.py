"""Wheels and environments of a test run. Each environment is made once and never changed by a test that shares it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .environments import CORE, Environment, Starter, build_wheels, link_packages


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all wheels."""
    return build_wheels(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to the third-party packages of this environment."""
    return link_packages(tmp_path_factory.mktemp("linked") / "packages")


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory, packages: Path, wheels: Path) -> Iterator[Starter]:
    """Where probes are forked from."""
    found = Starter(Environment(tmp_path_factory.mktemp("bare"), packages, wheels))
    yield found
    found.close()


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory, packages: Path, wheels: Path, starter: Starter) -> Iterator[Callable[[], Environment]]:
    """Make an environment in which nothing of mixle is installed yet."""
    made: list[Environment] = []

    def make() -> Environment:
        made.append(Environment(tmp_path_factory.mktemp("e"), packages, wheels, starter))
        return made[-1]

    yield make
    for environment in made:
        environment.forget()


@pytest.fixture(scope="session")
def environment(fresh: Callable[[], Environment]) -> Callable[..., Environment]:
    """The environment with the core and these plugins, by entry name or `name==version`; one for each set."""
    made: dict[frozenset[str], Environment] = {}

    def find(*names: str) -> Environment:
        key = frozenset(names)
        if key not in made:
            made[key] = fresh().install(CORE, *(name if name == "impostor" else f"mixle-{name}" for name in sorted(key)))
        return made[key]

    return find


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Callable[..., list[dict]]]]:
    """Start one rank in each of several environments; the result asks all of them at once."""
    probes, numbers = [], itertools.count()

    def start(*environments: Environment) -> Callable[..., list[dict]]:
        mine = [environment.probe() for environment in environments]
        probes.extend(mine)

        def ask(kind: str, *each: dict, **question: object) -> list[dict]:
            for rank, probe in enumerate(mine):
                probe.send(kind, rank=rank, **question, **(each[rank] if each else {}))
            return [probe.receive() for probe in mine]

        ask("join", world=len(mine), store=str(tmp_path / f"store{next(numbers)}"))
        return ask

    yield start
    for probe in probes:
        probe.close()

"""Settings and fixtures of the kernel's tests, which run without torch and without any subpackage of the core."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from .fakes import Site

settings.register_profile("kernel", max_examples=60, deadline=None, database=None, derandomize=True)
settings.load_profile("kernel")


def _holds_plugins(directory: str) -> bool:
    return any("[mixle]" in file.read_text() for file in Path(directory or ".").glob("*.dist-info/entry_points.txt"))


@pytest.fixture
def add_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Site]]:
    """Put directories for distributions first on `sys.path`; plugins of this environment are out of sight."""
    before = set(sys.modules)
    monkeypatch.delenv("MIXLE_PLUGINS", raising=False)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not _holds_plugins(entry)])

    def add(name: str) -> Site:
        (tmp_path / name).mkdir()
        # not syspath_prepend, whose undoing would leave the narrowed path behind
        monkeypatch.setattr(sys, "path", [str(tmp_path / name), *sys.path])
        importlib.invalidate_caches()
        return Site(tmp_path / name)

    yield add
    for module in set(sys.modules) - before:
        if module.endswith("_under_test"):
            del sys.modules[module]


@pytest.fixture
def site(add_site: Callable[[str], Site]) -> Site:
    """One such directory."""
    return add_site("site")

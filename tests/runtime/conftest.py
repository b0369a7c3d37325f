"""These tests pass their plugins in code: whatever is installed stays out, in this process and in the ranks it starts."""

import pytest


@pytest.fixture(autouse=True)
def no_installed_plugin(monkeypatch):
    monkeypatch.setenv("MIXLE_PLUGINS", "")

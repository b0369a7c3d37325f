"""Commands of these tests start quickly."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_commands):
    """Every command of these tests."""

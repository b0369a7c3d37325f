"""Ranks, and this process, load torch-ddp and no other plugin, whatever else is installed; every run has a limit."""

from __future__ import annotations

import functools

import pytest

from mixle_core.testing import run_ranks


@pytest.fixture(autouse=True)
def only_this_plugin(monkeypatch):
    monkeypatch.setenv("MIXLE_PLUGINS", "torch-ddp")


@pytest.fixture
def ranks():
    """`ranks(function, number, *args)` -> outcomes."""
    return functools.partial(run_ranks, env={"MIXLE_PLUGINS": "torch-ddp"}, timeout_s=60.0, group_timeout_s=30.0)

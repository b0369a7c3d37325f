"""Ranks, and this process, load megatron-fsdp and no other plugin, whatever else is installed; every run has a limit."""

from __future__ import annotations

import functools

import pytest

from mixle_core.testing import preload, run_ranks

preload("megatron_fsdp")


@pytest.fixture(autouse=True)
def only_this_plugin(monkeypatch):
    monkeypatch.setenv("MIXLE_PLUGINS", "megatron-fsdp")


@pytest.fixture
def ranks():
    """`ranks(function, number, *args)` -> outcomes."""
    return functools.partial(run_ranks, env={"MIXLE_PLUGINS": "megatron-fsdp"}, timeout_s=120.0, group_timeout_s=20.0)

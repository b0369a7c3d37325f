"""The guards of what measuring needs from megatron-fsdp."""

from __future__ import annotations

import importlib.metadata
import types

import pytest
from mixle_megatron_fsdp import _upstream

from mixle_core import CapabilityError


def test_a_series_that_was_not_measured_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.0")
    with pytest.raises(CapabilityError, match=r"megatron-fsdp 0.7.0: .* measured with 0.6; way out: install megatron-fsdp 0.6.\*"):
        _upstream.upstream()


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(CapabilityError, match=r"not installed; way out: pip install 'mixle-megatron-fsdp\[measure\]'"):
        _upstream.upstream()


def test_a_private_name_that_is_gone_is_named(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.9")
    monkeypatch.setattr(_upstream, "upstream", lambda name="": types.SimpleNamespace())
    with pytest.raises(CapabilityError, match=r"megatron-fsdp 0.6.9: .* has no GradReducePipeline"), _upstream.counted_calls():
        pass

"""The names that come with `import mixle_core`."""

from __future__ import annotations

import re

import pytest

import mixle_core

LAZY = {"Reduction", "Session", "attach", "explain", "get_training_backend", "prepare"}


def test_every_public_name_of_the_kernel_is_there():
    assert len(mixle_core.__all__) == len(set(mixle_core.__all__))
    assert set(mixle_core.__all__) > LAZY
    assert {name for name in mixle_core.__all__ if name not in vars(mixle_core)} <= LAZY


def test_nothing_else_is_public_but_modules():
    kinds = {name: type(value).__name__ for name, value in vars(mixle_core).items() if not name.startswith("_")}
    assert {kinds[name] for name in set(kinds) - set(mixle_core.__all__) - {"annotations", "Any", "TYPE_CHECKING"}} <= {"module"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=re.escape("module 'mixle_core' has no attribute 'atach'")):
        mixle_core.atach  # noqa: B018


def test_the_version_has_three_numbers():
    assert re.fullmatch(r"\d+\.\d+\.\d+", mixle_core.__version__)

"""What tests of several folders share: an interpreter that has imported torch, for the commands that they start."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """Path of a program that stands for Python and starts as a fork of one that has imported torch and transformers."""
    import ahead

    with ahead.started(tmp_path_factory.mktemp("ahead")) as program:
        yield program


@pytest.fixture(scope="session")
def quick_commands(python):
    """Let `mixle_command` start its commands, and the ranks that these launch, so."""
    before = os.environ.get("MIXLE_TEST_PYTHON")
    os.environ["MIXLE_TEST_PYTHON"] = str(python)
    yield
    os.environ.pop("MIXLE_TEST_PYTHON")
    if before is not None:
        os.environ["MIXLE_TEST_PYTHON"] = before

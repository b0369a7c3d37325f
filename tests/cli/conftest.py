"""The command line in this process."""

import sys

import pytest

from mixle_core.cli import main


@pytest.fixture
def mixle(monkeypatch, capsys):
    """Run `mixle ARGUMENTS`; return (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["mixle", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        return stopped.value.code, out, err

    return run


@pytest.fixture(scope="session", autouse=True)
def _quick(quick_commands):
    """Every command of these tests."""

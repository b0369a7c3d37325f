"""Ranks started on this machine: what they get, how they end, and whose words come back."""

import os
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from mixle_core.runtime.launch import LaunchResult, is_rank, launch, leave_error

SAYS = """
def say(text):
    said = {"message": {"message": text, "extraInfo": {"timestamp": "1"}}}
    pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(said))
"""


@pytest.fixture
def script(tmp_path):
    """Write a script for the ranks; without torch, so that it starts at once."""

    def write(body):
        path = tmp_path / "ranks.py"
        path.write_text("import json, os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n" + SAYS + textwrap.dedent(body))
        return str(path)

    return write


def test_every_rank_runs_the_script_with_its_arguments_and_its_place(script, tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_PARENT", "yes")
    before = dict(os.environ)
    path = script("""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "FROM_PARENT", "EXTRA", "OMP_NUM_THREADS")
        pathlib.Path(sys.argv[1], str(rank)).write_text(json.dumps([os.environ[name] for name in names] + sys.argv[2:]))
    """)
    assert launch([path, str(tmp_path), "--flag", "a b"], 2, env={"EXTRA": "more", "OMP_NUM_THREADS": "3"}) == LaunchResult(0)
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text() == f'["{rank}", "2", "{rank}", "yes", "more", "3", "--flag", "a b"]'
    assert dict(os.environ) == before


def test_the_exit_code_and_the_line_of_the_failing_rank_survive(script):
    """The other rank is ended; it would have run for minutes."""
    path = script("""
        if rank == 1:
            say("no such model: qwen9")
            sys.exit(2)
        time.sleep(300)
    """)
    assert launch([path], 2) == LaunchResult(2, "no such model: qwen9", 1)


def test_the_cause_is_told_and_not_what_the_others_say_about_it(script, tmp_path):
    """Rank 1 says what is wrong and lingers; rank 0 loses its peer, and ends first."""
    path = script("""
        told = pathlib.Path(sys.argv[1], "told")
        if rank == 1:
            say("ranks prepared different things")
            told.touch()
            time.sleep(300)
        while not told.exists():
            time.sleep(0.05)
        say("RuntimeError: connection closed by peer")
        sys.exit(1)
    """)
    assert launch([path, str(tmp_path)], 2) == LaunchResult(1, "ranks prepared different things", 1)


def test_a_rank_that_only_ends_is_told_by_its_exit_code(script):
    assert launch([script("sys.exit(7 if rank == 1 else 0)")], 2) == LaunchResult(7, "rank 1 ended with exit code 7", 1)


def test_a_rank_that_is_killed_is_told_by_its_signal(script):
    path = script("""
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
    """)
    assert launch([path], 2) == LaunchResult(1, "rank 0 ended with signal SIGKILL", 0)


def test_two_launches_at_once_take_different_ports(script, tmp_path):
    """Each waits until the other's ranks run, and tells its port."""
    path = script("""
        mine, other = (pathlib.Path(sys.argv[1], name) for name in sys.argv[2:])
        mine.write_text(os.environ["MASTER_PORT"])
        while not other.exists():
            time.sleep(0.05)
    """)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda names: launch([path, str(tmp_path), *names], 1), [("a", "b"), ("b", "a")]))
    assert results == [LaunchResult(0), LaunchResult(0)]
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_a_rank_leaves_its_words_where_the_launcher_looks(script):
    """The whole way: a rank that uses what mixle gives it."""
    path = script("""
        from mixle_core.runtime.launch import is_rank, leave_error
        assert is_rank() and leave_error("two lines of words")
        sys.exit(3)
    """)
    assert launch([path], 1) == LaunchResult(3, "two lines of words", 0)


def test_without_a_launcher_nothing_is_left_and_this_is_no_rank(monkeypatch):
    for name in ("TORCHELASTIC_ERROR_FILE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not leave_error("unheard") and not is_rank()
    monkeypatch.setenv("RANK", "0")
    assert not is_rank()

"""How checks are registered, judged once, exempted, and brought in over two versions."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn

import attrs

from mixle_core import __version__

FIRST = "0.1"
"""The minor version that brought the suite: its checks fail from the beginning."""


class NewCheckWarning(UserWarning):
    """A check that is new in this minor version does not pass; in the next it fails."""


class NotConformingError(AssertionError):
    """A rule that the plugin breaks: what was found, what was expected, and the way out."""


class _NothingToJudgeError(Exception):
    """A check that has no object here."""


@attrs.frozen
class Rule:
    """One check: its public name, the minor version that brought it, the checks that have to pass before it says anything."""

    name: str
    since: str
    needs: tuple[str, ...]
    function: Callable[[Any], None]


@attrs.frozen(eq=False)
class Result:
    """What a check came to; one that is blocked waits for another to pass."""

    kind: Literal["passed", "failed", "skipped", "blocked"]
    text: str = ""
    error: BaseException | None = None


_results: weakref.WeakKeyDictionary[type, dict[str, Result]] = weakref.WeakKeyDictionary()


def check(*, since: str, needs: Iterable[str] = ()) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a method `test_NAME` of a `PluginConformance` the check NAME.

    Args:
        since: minor version of mixle-core that brings it, such as "0.2". It only warns in that version and fails from the next on;
            those of the first version fail at once.
        needs: checks that have to pass before this one says anything.
    """

    def mark(function: Callable[[Any], None]) -> Callable[[Any], None]:
        rule = Rule(function.__name__.removeprefix("test_"), since, tuple(needs), function)

        @functools.wraps(function)
        def test(self: Any) -> None:
            report(self, rule)

        test.mixle_rule = rule  # type: ignore[attr-defined]
        return test

    return mark


def rules(suite: type) -> dict[str, Rule]:
    """Name -> check, of a suite and of its bases."""
    found = [getattr(getattr(suite, name), "mixle_rule", None) for name in dir(suite) if name.startswith("test_")]
    return {rule.name: rule for rule in found if rule is not None}


def broken(text: str) -> NoReturn:
    """End a check: the plugin breaks its rule."""
    raise NotConformingError(text)


def nothing_to_judge(reason: str) -> NoReturn:
    """End a check: it has no object here."""
    raise _NothingToJudgeError(reason)


def result(suite: Any, rule: Rule) -> Result:
    """Judge one check of a suite, once for all tests that ask."""
    known = _results.setdefault(type(suite), {})
    if rule.name not in known:
        known[rule.name] = _judged(suite, rule)
    return known[rule.name]


def _judged(suite: Any, rule: Rule) -> Result:
    every = rules(type(suite))
    for need in rule.needs:
        found = result(suite, every[need])
        if found.kind == "blocked" or (found.kind == "failed" and need not in suite.unsupported):
            return Result("blocked", need if found.kind == "failed" else found.text)
    try:
        rule.function(suite)
    except _NothingToJudgeError as reason:
        return Result("skipped", str(reason))
    except NotConformingError as error:
        return Result("failed", str(error), error)
    except Exception as error:  # of the plugin, or of the author's own methods: the check names it
        return Result("failed", f"{type(error).__name__}: {error}", error)
    return Result("passed")


def report(suite: Any, rule: Rule) -> None:
    """Tell pytest what a check came to."""
    import pytest

    found = result(suite, rule)
    if found.kind == "blocked":
        pytest.skip(f"check {found.text} fails, and until it passes this one says nothing")
    reason = suite.unsupported.get(rule.name)
    if reason is not None:
        if found.kind == "failed":
            pytest.xfail(f"unsupported: {reason}")
        what = "passes" if found.kind == "passed" else f"has nothing to judge here ({found.text})"
        raise NotConformingError(f"check {rule.name} is in `unsupported` ({reason}), and it {what}; remove it from `unsupported`")
    if found.kind == "skipped":
        pytest.skip(found.text)
    if found.kind == "failed":
        if is_new(rule.since, __version__):
            text = f"check {rule.name} is new in mixle-core {rule.since} and fails from the next minor version on: {found.text}"
            warnings.warn(text, NewCheckWarning, stacklevel=3)
            return
        raise NotConformingError(f"check {rule.name}: {found.text}") from found.error


def is_new(since: str, version: str) -> bool:
    """Whether a check of minor version `since` only warns in `version`."""
    return _minor(since) > _minor(FIRST) and _minor(version) <= _minor(since)


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)

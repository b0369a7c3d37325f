"""How often each parameter was reduced in an update, by whom; anything but once is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mixle_core.errors import LedgerError, explain_failure


class Ledger:
    """Counts reductions of one update and judges them at its end.

    Args:
        expected: logical name -> owner, for every parameter with an owner that reduces.
    """

    def __init__(self, expected: Mapping[str, str]) -> None:
        self._expected = dict(expected)
        self._counts: dict[str, int] = dict.fromkeys(self._expected, 0)

    def record(self, owner: str, counts: Mapping[str, int]) -> None:
        """Add what `owner` says it reduced."""
        for name, number in counts.items():
            if self._expected.get(name) != owner:
                self._counts = dict.fromkeys(self._expected, 0)
                raise LedgerError(f"{owner} reduced {name}, which belongs to {self._expected.get(name, 'nobody')}")
            self._counts[name] += number

    def close(self, unused: Iterable[str], update: int) -> None:
        """End the update: every parameter once, those of `unused` (no gradient on any rank) at most once.

        Raises:
            LedgerError: naming each parameter, its owner and its count.
        """
        tolerated = set(unused)
        wrong = {n: c for n, c in self._counts.items() if c != 1 and not (c == 0 and n in tolerated)}
        self._counts = dict.fromkeys(self._expected, 0)
        if not wrong:
            return
        lines = [
            f"{name}: {'not reduced' if count == 0 else f'reduced {count} times'} by {self._expected[name]}"
            for name, count in wrong.items()
        ]
        raise LedgerError(
            explain_failure(
                f"update {update}: {len(wrong)} of {len(self._expected)} parameters were not reduced exactly once",
                lines,
                "run every microbatch but the last inside no_sync(), call the module that attach returned, and set "
                "ParallelPlan(unused_parameters=True) when a parameter may go unused",
            )
        )

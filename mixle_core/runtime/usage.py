"""Which parameters the backwards of an update used, and whether that may change from update to update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from mixle_core.plan import ParallelPlan
from mixle_core.runtime.groups import Mesh


class Usage:
    """Watches use per backward, so that an owner knows when it may reduce while the last backward still runs.

    Overlapping is right only when every backward uses every parameter on every rank. The first update finds out (unless
    the plan says it), with one small collective; afterwards only a model whose use varies pays for asking at each update.

    Args:
        names: equal on every rank.
        elsewhere: those that other ranks alone hold.
    """

    def __init__(self, names: Iterable[str], plan: ParallelPlan, *, elsewhere: Iterable[str] = ()) -> None:
        self._names = tuple(names)
        self._elsewhere = frozenset(elsewhere)
        self.varies: bool | None = plan.unused_parameters
        self._seen: set[str] = set()
        self._window: set[str] = set()
        self._always = set(self._names)

    def saw(self, name: str) -> None:
        """A backward produced a gradient for `name` on this rank."""
        self._seen.add(name)

    def next_forward(self) -> None:
        """A forward with gradients begins: what was seen so far belongs to an earlier backward."""
        if self._seen:
            self._fold()

    def _fold(self) -> None:
        self._always &= self._seen | self._elsewhere
        self._window |= self._seen
        self._seen = set()

    def discard(self) -> None:
        """Forget an update that was given up."""
        self._seen, self._window, self._always = set(), set(), set(self._names)

    def settle(self, mesh: Mesh) -> tuple[frozenset[str], frozenset[str]]:
        """End the update. Collective unless use is known not to vary.

        Returns:
            The names that no rank used, and those that this rank should have used and did not. Of the latter there are
            some only when use is known not to vary, and then the update must fail.
        """
        self._fold()
        window, always = self._window, self._always
        self._window, self._always = set(), set(self._names)
        mesh.used |= window
        if self.varies is False:
            return frozenset(), frozenset(set(self._names) - window - self._elsewhere)
        flags = [name in window for name in self._names] + [name not in always for name in self._names]
        found = torch.tensor(flags, dtype=torch.uint8)
        if flags:
            mesh.all_reduce_control(found, dist.ReduceOp.MAX)
        used, missed = found.bool().split(len(self._names)) if flags else (found, found)
        if self.varies is None:
            self.varies = bool(missed.any())
        return frozenset(name for name, flag in zip(self._names, used.tolist(), strict=True) if not flag), frozenset()

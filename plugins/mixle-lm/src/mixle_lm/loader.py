"""Rows in batches: one global order for each epoch, cut over the data ranks, at any place to go on from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from mixle_core import UsageError
from mixle_lm.rows import Rows, require_whole


@attrs.frozen(eq=False)
class RowBatch:
    """What one data rank trains on at once.

    Args:
        tensors: `input_ids`, `targets` and perhaps `position_ids`: int64 of shape [rows, length], per data rank.
        num_examples: how many of the rows are not there only to fill up.
    """

    tensors: dict[str, torch.Tensor]
    num_examples: int


class RowLoader:
    """Hands out the rows of one data rank, epoch after epoch.

    The order of an epoch depends on (seed, epoch) alone and is the same on every rank; batch k of the world is the k-th
    piece of it, and each data rank has its share. The last batch of an epoch has what is left, shared out as evenly as
    it goes; ranks with less get rows without a loss, so that all make the same number of backwards. Every row comes
    exactly once in each epoch.

    Iterating gives the rest of the current epoch. A batch counts as handed out when the caller has it.

    Args:
        batch_size: rows of a batch on each data rank.
        data_rank, data_size: this rank's place among those that see different rows.
        at_least: rows that a batch needs even at the end of an epoch: the plan's microbatches.
        shuffle: False keeps the order of the rows.
    """

    def __init__(
        self, rows: Rows, *, batch_size: int, data_rank: int = 0, data_size: int = 1, at_least: int = 1, seed: int = 0, shuffle: bool = True
    ) -> None:
        require_whole("batch_size", batch_size)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UsageError(f"seed={seed!r}: expected a whole number of at least 0")
        if batch_size < at_least:
            raise UsageError(f"batch_size={batch_size} for microbatches={at_least}: each microbatch needs a row")
        self.rows = rows
        self.epoch = 0
        self.position = 0
        self._share = (data_rank, data_size)
        self._batch = batch_size * data_size
        self._at_least = at_least
        self._seed, self._shuffle = seed, shuffle
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return math.ceil(len(self.rows) / self._batch)

    def batches_left(self, epochs: int) -> int:
        """Batches from here to the end of epoch number `epochs`, counted from 1."""
        if self.epoch >= epochs:
            return 0
        return (epochs - self.epoch - 1) * len(self) + math.ceil((len(self.rows) - self.position) / self._batch)

    def __iter__(self) -> Iterator[RowBatch]:
        order = self._epoch_order()
        while self.position < len(order):
            picked = order[self.position : self.position + self._batch]
            self.position += len(picked)
            yield self._mine(picked)
        self.epoch, self.position = self.epoch + 1, 0

    def _mine(self, picked: np.ndarray) -> RowBatch:
        rank, size = self._share
        mine = np.array_split(picked, size)[rank]
        height = max(-(-len(picked) // size), self._at_least)
        filled = np.concatenate([mine, np.full(height - len(mine), -1)])
        return RowBatch({name: torch.from_numpy(values) for name, values in self.rows.take(filled).items()}, len(mine))

    def _epoch_order(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            number = len(self.rows)
            order = np.random.default_rng((self._seed, self.epoch)).permutation(number) if self._shuffle else np.arange(number)
            self._order = (self.epoch, order)
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands: whole numbers and strings, equal on every rank, and good for any number of data ranks."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_rows": len(self.rows),
            "fingerprint": self.rows.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: no row twice and none lost, also on another number of data ranks or with another batch size.

        Raises:
            UsageError: the state is of other rows, or of another order of them.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"loader state: a {type(state).__name__}; expected what state_dict() returned")
        mine = self.state_dict()
        odd = [key for key in mine if key not in ("epoch", "position") and state.get(key) != mine[key]]
        if odd:
            raise UsageError(f"loader state: {odd[0]} is {state.get(odd[0])!r}, here it is {mine[odd[0]]!r}; pass the same rows and seed")
        for key in ("epoch", "position"):
            value = state.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= (len(self.rows) if key == "position" else value):
                raise UsageError(f"loader state: {key} is {value!r}; expected a number of rows up to {len(self.rows)}")
        self.epoch, self.position = state["epoch"], state["position"]

"""Token ids as rows to train on: packed, with the documents in them kept apart, and nothing dropped."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mixle_core import UsageError

DEFAULT_LENGTH = 128
IGNORED = -100
"""Target of a position without a loss."""

_SCAN = 2**24
"""Ids that are looked at in one go, so that a memory-mapped file never lies in memory whole."""


_SAMPLE = 2**14
"""Ids that go into a fingerprint: each may be a read of its own from a memory-mapped file."""


class Rows:
    """Rows of `length` inputs and as many targets, cut out of token ids when they are asked for.

    Of one stream, row r has the inputs `ids[r * length : (r + 1) * length]` and the targets one further on, so every token but
    the first is a target once; the last row is filled up with positions that have no loss. Of ids that come as rows (2-D),
    each has `length + 1` ids. With `dense=False` only the last position of a row has a target, and the last row of a
    stream starts early enough to be full.

    A target in another document than its input has no loss, and positions restart with each document.

    Args:
        token_ids: see `read_token_ids`.
        length: inputs of a row; None is 128, or what ids have that come as rows.
        vocab_size: ids are at least 0 and below it.
        eos_token_id: the id that ends a document; None when documents come one by one, or are of no interest.
        dense: whether every position has a target.

    Raises:
        UsageError: nothing or too little to train on, ids that are no integers or outside the vocabulary.
    """

    def __init__(
        self, token_ids: Any, *, length: int | None = None, vocab_size: int, eos_token_id: int | None = None, dense: bool = True
    ) -> None:
        self.ids, self._starts = read_token_ids(token_ids)
        self.dense = dense
        self.vocab_size = vocab_size
        self.length = self._length(length)
        self._eos = eos_token_id
        _check_range(self.ids, vocab_size)
        if eos_token_id is not None and not 0 <= eos_token_id < vocab_size:
            raise UsageError(f"eos_token_id={eos_token_id}: expected an id of the vocabulary of {vocab_size}")

    def _length(self, length: int | None) -> int:
        if self.ids.ndim == 2:
            inputs = int(self.ids.shape[1]) - 1
            if length not in (None, inputs):
                raise UsageError(f"token_ids of shape {list(self.ids.shape)} are rows of {inputs} inputs; got sequence_length={length}")
            if inputs < 1 or not len(self.ids):
                raise UsageError(f"token_ids of shape {list(self.ids.shape)}: expected rows of at least 2 ids")
            return inputs
        if length is None:
            length = DEFAULT_LENGTH
        require_whole("sequence_length", length, "input a row")
        needed = 2 if self.dense else length + 1
        if len(self.ids) < needed:
            why = "an input and a target" if self.dense else f"a row of {length} inputs and its target"
            raise UsageError(f"token_ids has {len(self.ids)} ids; expected at least {needed}: {why}")
        return length

    def __len__(self) -> int:
        return len(self.ids) if self.ids.ndim == 2 else math.ceil((len(self.ids) - 1) / self.length)

    @property
    def documents(self) -> bool:
        """Whether the rows know of documents."""
        return self._eos is not None or self._starts is not None

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of shape, type, cut and a sample of the ids, to tell other data from these."""
        places = np.unique(np.linspace(0, self.ids.size - 1, _SAMPLE).astype(np.int64))
        sample = self.ids[places] if self.ids.ndim == 1 else self.ids[places // self.ids.shape[1], places % self.ids.shape[1]]
        cut = (self.ids.shape, str(self.ids.dtype), self.length, self.dense, self._eos, None if self._starts is None else len(self._starts))
        return hashlib.sha256(repr(cut).encode() + np.ascontiguousarray(sample).tobytes()).hexdigest()

    def take(self, picked: np.ndarray) -> dict[str, np.ndarray]:
        """Rows by number; -1 stands for a row without a loss.

        Args:
            picked: int64 array of shape [rows].

        Returns:
            `input_ids`, `targets` (already one further on; -100 has no loss) and, where documents are known, `position_ids`:
            int64 arrays of shape [rows, length].
        """
        filler = picked < 0
        wanted = np.where(filler, 0, picked)
        if self.ids.ndim == 2:
            tokens = self.ids[wanted].astype(np.int64)
            exists = np.ones_like(tokens, dtype=bool)
            document = self._by_eos(tokens)
        else:
            first = wanted * self.length
            if not self.dense:
                first = np.minimum(first, len(self.ids) - 1 - self.length)
            at = first[:, None] + np.arange(self.length + 1)
            exists = at < len(self.ids)
            tokens = np.where(exists, self.ids[np.minimum(at, len(self.ids) - 1)], 0).astype(np.int64)
            document = self._by_eos(tokens)
            if self._starts is not None:  # a document ends where either says so
                document = document + np.searchsorted(self._starts, at, side="right")
        # what fills a row up goes on with the document before it, so that positions say nothing of it
        document = np.maximum.accumulate(np.where(exists, document, 0), axis=1)
        tokens[filler], exists[filler] = 0, False
        targets = np.where(exists[:, 1:] & (document[:, 1:] == document[:, :-1]), tokens[:, 1:], IGNORED)
        if not self.dense:
            targets[:, :-1] = IGNORED
        batch = {"input_ids": tokens[:, :-1], "targets": targets}
        if self.documents:
            batch["position_ids"] = _positions(document[:, :-1])
        return batch

    def _by_eos(self, tokens: np.ndarray) -> np.ndarray:
        """Number of the document of each token within its row: a document ends with its end-of-sequence id."""
        ended = np.zeros(tokens.shape, dtype=np.int64)
        if self._eos is not None:
            ended[:, 1:] = np.cumsum(tokens[:, :-1] == self._eos, axis=1)
        return ended


def require_whole(name: str, value: object, of: str = "") -> None:
    """Raise UsageError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r}: expected {f'at least 1 {of}' if of else 'a whole number of at least 1'}")


def _positions(document: np.ndarray) -> np.ndarray:
    """Position of each input within its document, or within its row where the document began before it."""
    index = np.broadcast_to(np.arange(document.shape[1]), document.shape)
    begins = np.ones(document.shape, dtype=bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)


def read_token_ids(token_ids: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Token ids as an array of integers, and where documents start in it.

    Args:
        token_ids: an array or tensor of integers of shape [ids] (one stream) or [rows, ids of a row]; the path of a `.npy`
            file, which is memory-mapped; or an iterable, read to its end: of ids (one stream), or of arrays or lists of
            ids, each of which is a document.

    Raises:
        UsageError: anything else, or nothing in it.
    """
    if isinstance(token_ids, (str, Path)):
        return _checked(_mapped(Path(token_ids)), f"token_ids {token_ids}"), None
    if not isinstance(token_ids, np.ndarray) and hasattr(token_ids, "detach"):
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, np.ndarray):
        return _checked(token_ids, "token_ids"), None
    if not isinstance(token_ids, Iterable):
        raise UsageError(
            f"token_ids is a {type(token_ids).__name__}; expected an array, a tensor, the path of a .npy file, or an iterable "
            "of ids or documents"
        )
    return _read(iter(token_ids))


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no array of numbers"
        raise UsageError(f"token_ids {path}: not a readable .npy file of integers ({reason}); text is tokenized first") from error


def _checked(ids: np.ndarray, where: str) -> np.ndarray:
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim not in (1, 2):
        raise UsageError(f"{where}: {ids.dtype} of shape {list(ids.shape)}; expected integers of shape [ids] or [rows, ids of a row]")
    if not ids.size:
        raise UsageError(f"{where}: empty; expected token ids")
    return ids


def _read(items: Any) -> tuple[np.ndarray, np.ndarray | None]:
    first = next(items, None)
    if first is None:
        raise UsageError("token_ids: empty; expected token ids")
    rest = itertools.chain([first], items)
    try:
        if np.ndim(first) == 0:
            ids: Sequence[np.ndarray] = [np.asarray(list(rest))]
            return _checked(ids[0], "token_ids"), None
        ids = [np.asarray(document) for document in rest]
    except (ValueError, TypeError) as error:
        raise UsageError(f"token_ids: an iterable of ids, or of documents that are ids; it gave neither ({error})") from error
    ids = [document for document in ids if document.size]
    for document in ids:
        if document.ndim != 1:
            raise UsageError(f"token_ids: a document of shape {list(document.shape)}; expected ids of one dimension")
        _checked(document, "token_ids: a document")
    if not ids:
        raise UsageError("token_ids: only empty documents; expected token ids")
    return np.concatenate(ids), np.cumsum([0, *(len(document) for document in ids[:-1])])


def _check_range(ids: np.ndarray, vocab_size: int) -> None:
    step = max(1, _SCAN // (ids.shape[1] if ids.ndim == 2 else 1))
    for start in range(0, len(ids), step):
        low, high = int(ids[start : start + step].min()), int(ids[start : start + step].max())
        if low < 0 or high >= vocab_size:
            raise UsageError(f"token id {low if low < 0 else high} is outside the model's vocabulary of {vocab_size}")

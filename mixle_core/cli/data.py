"""Text every machine has, as rows of token ids, and the loss of a causal language model over them."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mixle_core.errors import UsageError

_HELD_OUT = 25
"""One file in so many is held out, chosen by its name."""

_TEXT = frozenset({".py", ".txt", ".md", ".rst", ".json", ".toml", ".cfg", ".c", ".h", ".rs", ".go", ".js", ".ts"})


@attrs.frozen(eq=False)
class Corpus:
    """Token ids cut into rows: int64 arrays of shape [rows, length]."""

    train: np.ndarray
    held_out: np.ndarray
    source: str

    def batch(self, seed: int, step: int, data_rank: int, data_size: int, rows: int) -> torch.Tensor:
        """Rows of one data rank at `step`, shape [rows, length]: a global shuffle by (seed, epoch), then disjoint slices."""
        total = rows * data_size
        first = step * total + data_rank * rows
        epochs, offsets = np.divmod(np.arange(first, first + rows), len(self.train))
        picked = [_order(seed, int(epoch), len(self.train))[offset] for epoch, offset in zip(epochs, offsets, strict=True)]
        return torch.from_numpy(self.train[picked].astype(np.int64))


_orders: dict[tuple[int, int, int], np.ndarray] = {}


def _order(seed: int, epoch: int, number: int) -> np.ndarray:
    key = (seed, epoch, number)
    if key not in _orders:
        _orders.clear()
        _orders[key] = np.random.default_rng((seed, epoch)).permutation(number)
    return _orders[key]


def read_corpus(source: str, length: int, vocab_size: int) -> Corpus:
    """Read `stdlib` (the sources of Python's standard library), a text file, a directory of text, or token ids in a .npy.

    Text becomes its bytes. Whole files are held out, chosen by name; of a single file or array, the last rows.

    Raises:
        UsageError: nothing to read, too little of it, or ids outside the vocabulary.
    """
    if length < 2:
        raise UsageError(f"--sequence-length {length}: expected at least 2 tokens")
    if source.endswith(".npy"):
        train, held = _split_rows(_rows(_read_ids(Path(source)), length))
    else:
        root = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source)
        files = _text_files(root, stdlib=source == "stdlib")
        if len(files) == 1:
            train, held = _split_rows(_rows(_bytes(files), length))
        else:
            out = [file for file in files if _is_held_out(str(file.relative_to(root)))] or files[-1:]
            train, held = _rows(_bytes([f for f in files if f not in set(out)]), length), _rows(_bytes(out), length)
    if not len(train) or not len(held):
        raise UsageError(f"--data {source}: too short for rows of {length} tokens; expected at least two rows")
    largest = int(max(train.max(), held.max()))
    if largest >= vocab_size or int(min(train.min(), held.min())) < 0:
        raise UsageError(f"--data {source}: token id {largest} is outside the model's vocabulary of {vocab_size}")
    return Corpus(train, held, source)


def _read_ids(path: Path) -> np.ndarray:
    try:
        ids: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--data {path}: {error}") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"--data {path}: {ids.dtype} array of shape {list(ids.shape)}; expected integers of one dimension")
    return ids


def _text_files(root: Path, *, stdlib: bool) -> list[Path]:
    if root.is_file():
        return [root]
    found = sorted(p for p in root.rglob("*.py" if stdlib else "*") if p.suffix in _TEXT and "site-packages" not in p.parts and p.is_file())
    if not found:
        raise UsageError(f"--data {root}: no text file there; expected 'stdlib', a text file, a directory of text, or a .npy of token ids")
    return found


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT == 0


def _bytes(files: list[Path]) -> np.ndarray:
    return np.frombuffer(b"\0".join(file.read_bytes() for file in files), dtype=np.uint8)


def _rows(ids: np.ndarray, length: int) -> np.ndarray:
    return ids[: len(ids) // length * length].reshape(-1, length)


def _split_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    held = max(1, len(rows) // _HELD_OUT)
    return rows[:-held], rows[-held:]


def causal_lm_loss(module: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token loss of `ids` (shape [rows, length], per data rank) and its number of tokens."""
    output: Any = module(input_ids=ids)
    logits = output.logits if hasattr(output, "logits") else output
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
    return loss, ids[:, 1:].numel()


def squared_loss(module: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum of squared outputs, for models that take no token ids; every row counts as one token."""
    output = module(rows)
    return output.float().pow(2).sum(), rows.shape[0]


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids the model takes, or None when it has no embedding."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if size is not None:
        return int(size)
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)

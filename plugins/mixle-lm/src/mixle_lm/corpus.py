"""Text that is at hand as token ids: its bytes, file after file, some files held out."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import attrs
import numpy as np

from mixle_core import UsageError
from mixle_lm.rows import read_token_ids

BOUNDARY = 0
"""Byte behind each file: text has none, so it ends a document."""

_HELD_OUT = 25
"""One file in so many is held out, chosen by its name; of a single file or array, the last of so many parts."""

_TEXT = frozenset({".py", ".txt", ".md", ".rst", ".json", ".toml", ".cfg", ".c", ".h", ".rs", ".go", ".js", ".ts"})


@attrs.frozen(eq=False)
class Corpus:
    """Token ids to train on and to hold out.

    Args:
        train, held_out: integer arrays of shape [ids].
        eos_token_id: what ends a document in them, or None.
        source: where they came from.
    """

    train: np.ndarray
    held_out: np.ndarray
    eos_token_id: int | None
    source: str

    def held_out_rows(self, number: int, length: int) -> np.ndarray:
        """Up to `number` rows of `length` inputs and their targets, spread evenly over what is held out: shape [rows, length + 1].

        Raises:
            UsageError: less is held out than one row.
        """
        last = len(self.held_out) - length - 1
        if last < 0:
            raise UsageError(f"{self.source}: {len(self.held_out)} ids are held out; expected at least {length + 1} for a row")
        starts = np.unique(np.linspace(0, last, min(number, max(1, last // length))).astype(np.int64))
        rows: np.ndarray = self.held_out[starts[:, None] + np.arange(length + 1)]
        return rows


def read_corpus(source: str) -> Corpus:
    """Read `stdlib` (the sources of Python's standard library), a text file, a directory of text, or token ids in a `.npy`.

    Text becomes its bytes, a zero byte behind each file.

    Raises:
        UsageError: nothing to read there.
    """
    if source.endswith(".npy"):
        ids, _ = read_token_ids(source)
        if ids.ndim != 1:
            raise UsageError(f"{source}: {ids.dtype} of shape {list(ids.shape)}; expected integers of one dimension, a stream of token ids")
        return Corpus(*_split(ids), None, source)
    root = Path(sysconfig.get_paths()["stdlib"]) if source == "stdlib" else Path(source)
    files = _text_files(root, stdlib=source == "stdlib")
    if len(files) == 1:
        return Corpus(*_split(_bytes(files)), BOUNDARY, source)
    out = [file for file in files if _is_held_out(str(file.relative_to(root)))] or files[-1:]
    kept = set(files) - set(out)
    return Corpus(_bytes([file for file in files if file in kept]), _bytes(out), BOUNDARY, source)


def _text_files(root: Path, *, stdlib: bool) -> list[Path]:
    if root.is_file():
        return [root]
    found = sorted(p for p in root.rglob("*.py" if stdlib else "*") if p.suffix in _TEXT and "site-packages" not in p.parts and p.is_file())
    if not found:
        raise UsageError(f"{root}: no text file there; expected 'stdlib', a text file, a directory of text, or a .npy of token ids")
    return found


def _is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % _HELD_OUT == 0


def _bytes(files: list[Path]) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() + bytes([BOUNDARY]) for file in files), dtype=np.uint8)


def _split(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    held = max(1, len(ids) // _HELD_OUT)
    return ids[:-held], ids[-held:]

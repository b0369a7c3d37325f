"""Pickles of others, read without running anything: every name in them is on a list and stands for an inert record."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mixle_core.checkpoint._upstream import (
    BYTES_RECORDS,
    DTYPES,
    METADATA_RECORDS,
    STORAGES,
    TENSOR_RECORDS,
    TESTED,
    UNTYPED_STORAGE,
)
from mixle_core.checkpoint.errors import CheckpointError


class _Sealed(type):
    """A class that a pickle cannot change: an opcode may set attributes of whatever a name stands for."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{cls.__name__} is sealed")


class Record(metaclass=_Sealed):
    """What stands for an object in a pickle: the arguments and the state that were to make it, and nothing that acts on them."""

    __slots__ = ("arguments", "state")

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Record:  # noqa: PYI034 - a pickle calls it by the class of the record
        """Keep the arguments."""
        made = object.__new__(cls)
        object.__setattr__(made, "arguments", arguments)
        object.__setattr__(made, "state", None)
        return made

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("a record is sealed")


class Untyped(Record):
    """A storage of bytes."""

    __slots__ = ()


class Storage(Record):
    """Where the values of a tensor lie: what torch.save writes as a persistent id."""

    __slots__ = ()


def _records(names: set[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    return {(module, name): _Sealed(name, (Record,), {"__slots__": ()}) for module, name in sorted(names)}


_COMMON: dict[tuple[str, str], Any] = {("torch", name): dtype for name, dtype in DTYPES.items()} | {
    # types of C that no attribute can be set on, and that run nothing of ours or others
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
}
METADATA_NAMES: Mapping[tuple[str, str], Any] = _COMMON | _records(METADATA_RECORDS)
"""What may stand in `.metadata`."""
ENTRY_NAMES: Mapping[tuple[str, str], Any] = (
    _COMMON
    | _records(TENSOR_RECORDS | BYTES_RECORDS)
    | {("torch", name): dtype for name, dtype in STORAGES.items()}
    | {UNTYPED_STORAGE: Untyped}
)
"""What may stand in the data of an entry."""


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any], where: str, persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._where = where
        self._persistent = persistent

    def find_class(self, module: str, name: str, /) -> Any:
        found = self._names.get((module, name))
        if found is None:
            raise CheckpointError(
                f"{self._where}: it asks for {module}.{name}; expected only what a checkpoint of plain torch (read in {TESTED[0]} to "
                f"{TESTED[1]}) needs; nothing was run; way out: take it from a source that you trust, or save plain values",
                path=self._where,
            )
        return found

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a persistent id")
        return self._persistent(pid)


def read_pickle(data: bytes, names: Mapping[tuple[str, str], Any], where: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """What a pickle says, as plain values and records.

    Args:
        names: (module, name) -> what it stands for; inert, and sealed against being changed.
        where: for errors.
        persistent: what a persistent id stands for.

    Raises:
        CheckpointError: any other name, before anything was called; or no pickle.
    """
    try:
        return _Restricted(data, names, where, persistent).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise CheckpointError(f"{where}: no pickle that torch writes ({text}); way out: the file is damaged", path=where) from error

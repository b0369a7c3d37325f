"""Plain values as JSON with types, so that a checkpoint needs no pickle: what comes back is what was given, bit for bit."""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from mixle_core.checkpoint.errors import CheckpointError

MAX_DEPTH = 64
"""Values nested deeper are refused, written or read."""

_MAX_INT_BITS = 4096
_KEYS = (type(None), bool, int, float, str, bytes, tuple, torch.dtype, torch.Size)
_ALLOWED = "None, bool, int, float, str, bytes, list, tuple, dict, torch.dtype and torch.Size"
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def parse_json(data: bytes, where: str) -> Any:
    """JSON that says one thing only: UTF-8, no key twice in an object, no NaN or Infinity, no depth that exhausts the stack.

    Raises:
        CheckpointError: naming `where`.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        found = f"{where}: not the JSON that was written: {error}"
        raise CheckpointError(f"{found}; way out: the checkpoint is damaged: load another step", path=where) from error


def dump_json(document: Any) -> bytes:
    """The one form in which JSON is written: UTF-8, no spaces, keys in the order given."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        doubled = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"the key {doubled[0]!r} stands twice in one object")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def encode(value: Any, where: str) -> Any:
    """A value as JSON types; `decode` gives it back with the same types, the same bits and dicts in the same order.

    Args:
        where: the key path of the value, for the error.

    Raises:
        CheckpointError: a tensor, an array, or any other object; a cycle; text with lone surrogates. Nothing is converted silently.
    """
    return _encode(value, where, 0)


def _encode(value: Any, where: str, depth: int) -> Any:
    kind = type(value)  # exactly: a subclass would come back as its base
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where[:200]}: nested more than {MAX_DEPTH} deep, or in a cycle; way out: store a flatter value")
    if value is None or kind is bool:
        return value
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise CheckpointError(f"{where}: an int of {value.bit_length()} bits; expected at most {_MAX_INT_BITS}; way out: store bytes")
        return value
    if kind is float:
        return value if math.isfinite(value) else {"!float": struct.pack(">d", value).hex()}
    if kind is str:
        return _text(value, where)
    if kind is bytes:
        return {"!bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"!dtype": str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {"!size": [int(extent) for extent in value]}
    if kind is list or kind is tuple:
        items = [_encode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
        return items if kind is list else {"!tuple": items}
    if kind is dict:
        if all(type(key) is str and not key.startswith("!") for key in value):
            return {_text(key, where): _encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        return {"!dict": [[_key(key, where, depth), _encode(item, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()]}
    raise CheckpointError(
        f"{where}: cannot store a {kind.__module__}.{kind.__qualname__}; expected {_ALLOWED} (nothing is pickled); way out: {_hint(value)}"
    )


def _key(key: Any, where: str, depth: int) -> Any:
    if type(key) not in _KEYS:
        raise CheckpointError(
            f"{where}: a key of type {type(key).__module__}.{type(key).__qualname__}; expected {_ALLOWED}; way out: use a plain key"
        )
    return _encode(key, f"{where}, key {key!r}", depth + 1)


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where}: text with lone surrogates; expected Unicode text; way out: store bytes") from error
    return value


def _hint(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "save it as a named tensor, or its .tolist()"
    if type(value).__module__ == "numpy":
        scalar = getattr(value, "shape", None) == ()
        return "store its .item()" if scalar else "save torch.from_numpy(it) as a named tensor, or its .tolist()"
    base = next((plain for plain in (bool, int, float, str, bytes, list, tuple, dict) if isinstance(value, plain)), None)
    return f"convert it to a plain {base.__name__}" if base else "store the plain values that rebuild it"


def decode(value: Any, where: str) -> Any:
    """What `encode` was given.

    Raises:
        CheckpointError: an unknown tag, a payload of another type, a key twice, or values nested too deep.
    """
    try:
        return _decode(value, 0)
    except (ValueError, TypeError, binascii.Error) as error:
        text = f"{where}: {error}; expected a value that was encoded here; way out: load another step"
        raise CheckpointError(text, path=where) from error


def _decode(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise ValueError("a number beyond the range of float")
        return value
    if kind is str:
        value.encode()  # a lone surrogate is a ValueError
        return value
    if kind is list:
        return [_decode(item, depth + 1) for item in value]
    tag = next((key for key in value if key.startswith("!")), None)
    if tag is None:
        return {_decode(key, depth): _decode(item, depth + 1) for key, item in value.items()}
    if len(value) != 1 or tag not in _TAGS:
        raise ValueError(f"unknown tag {tag!r}" if tag not in _TAGS else f"{len(value) - 1} keys beside the tag {tag!r}")
    payload_type, restore = _TAGS[tag]
    payload = value[tag]
    if type(payload) is not payload_type:
        raise ValueError(f"{tag} holds a {type(payload).__name__}, not a {payload_type.__name__}")
    return restore(payload, depth)


def _float(text: str, depth: int) -> float:
    raw = bytes.fromhex(text)
    if len(raw) != 8 or raw.hex() != text or math.isfinite(number := struct.unpack(">d", raw)[0]):
        raise ValueError(f"!float holds {text[:40]!r}, not the 16 hexadecimal digits of an infinity or NaN")
    return float(number)


def _bytes(text: str, depth: int) -> bytes:
    raw = base64.b64decode(text, validate=True)
    if base64.b64encode(raw).decode() != text:
        raise ValueError("!bytes is not base64 as it was written")
    return raw


def _dtype(name: str, depth: int) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"!dtype holds {name[:40]!r}, which this torch does not have")
    return _DTYPES[name]


def _size(extents: list[Any], depth: int) -> torch.Size:
    if not all(type(extent) is int and 0 <= extent < 2**63 for extent in extents):
        raise ValueError("!size holds something other than sizes")
    return torch.Size(extents)


def _dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
        raise ValueError("!dict holds something other than pairs")
    found = {}
    for key, item in pairs:
        restored = _decode(key, depth + 1)
        if type(restored) not in _KEYS:
            raise ValueError(f"!dict has a key of type {type(restored).__name__}")
        found[restored] = _decode(item, depth + 1)
    if len(found) != len(pairs):
        raise ValueError("!dict has a key twice")
    return found


_TAGS: dict[str, tuple[type, Callable[[Any, int], Any]]] = {
    "!float": (str, _float),
    "!bytes": (str, _bytes),
    "!dtype": (str, _dtype),
    "!size": (list, _size),
    "!tuple": (list, lambda items, depth: tuple(_decode(item, depth + 1) for item in items)),
    "!dict": (list, _dict),
}

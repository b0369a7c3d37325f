"""The states of the random generators of one process, as tensors."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch

from mixle_core.checkpoint import CheckpointError
from mixle_core.runtime.initialise import derive_seed

_PYTHON_VERSION = 3
"""Of what random.getstate() returns."""


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Of Python, NumPy (the global one), torch's CPU and, where one is used, its device."""
    states = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if device.type == "cuda":
        states["device"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on from what `generator_states` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(_as_python(states["python"]))
    np.random.set_state(_as_numpy(states["numpy"]))  # noqa: NPY002 - the global generator is what is saved
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"], device)


def seed_generators(seed: int, step: int, position: Mapping[str, int]) -> None:
    """Start anew where the states of the ranks that saved are of no use: by seed, step and place among those with other data.

    Ranks that differ only in model axes draw alike, as at `attach`.
    """
    drawn = derive_seed(seed, "resume", step, *sorted(position.items()))
    torch.manual_seed(drawn)
    random.seed(drawn)
    np.random.seed(drawn % 2**32)  # noqa: NPY002 - as above


def _python_state() -> torch.Tensor:
    version, words, gauss = random.getstate()
    if version != _PYTHON_VERSION:
        raise CheckpointError(f"random.getstate() has version {version}; expected {_PYTHON_VERSION}; way out: use Python 3.11 to 3.14")
    return torch.tensor([*words, *_optional(gauss)], dtype=torch.int64)


def _as_python(state: torch.Tensor) -> tuple[int, tuple[int, ...], float | None]:
    *words, known, bits = state.tolist()
    return _PYTHON_VERSION, tuple(words), _float(bits) if known else None


def _numpy_state() -> torch.Tensor:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - as above
    if kind != "MT19937":
        raise CheckpointError(f"NumPy's global generator is a {kind}; expected MT19937; way out: leave the global one as it comes")
    return torch.tensor([*keys.tolist(), position, has_gauss, _bits(float(gauss))], dtype=torch.int64)  # type: ignore[union-attr]


def _as_numpy(state: torch.Tensor) -> tuple[str, np.ndarray, int, int, float]:
    *keys, position, has_gauss, bits = state.tolist()
    return "MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, _float(bits)


def _optional(value: float | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, _bits(value))


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])

"""Collectives and payload of one update, by what they carry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import mixle_core as mx
from mixle_core.runtime import Mesh, counted_traffic

FUNCTIONAL = ("all_reduce", "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single")
KINDS = ("data", "tp gradients", "tp activations", "control")


def kind(description: str) -> str:
    """What a process group carries. torch, transformers and Fabric use one group for all that goes over tp: it counts as activations."""
    owner, _, axes = description.removeprefix("mixle:").removeprefix("bench:").rpartition(":")
    if "control" in (owner, axes):
        return "control"
    if owner == "tp.forward" or axes in ("tp.forward", "mesh_tp", "mesh_tensor_parallel"):
        return "tp activations"
    return "tp gradients" if "tp" in axes.split(".") else "data"


class Counter:
    """Counts with mixle's own counter, and what DTensor's operators call below autograd, where that one sees nothing.

    Payload is the larger of what goes in and what comes out on this rank.
    """

    def __init__(self, plan: mx.ParallelPlan) -> None:
        Mesh(plan, torch.device("cpu"))  # counting starts with the first
        self._inside = False
        self._below: dict[str, list[int]] = {}
        for name in FUNCTIONAL:  # their names differ between versions of torch
            if inner := getattr(functional, name, None):
                setattr(functional, name, self._watched(inner))

    def count(self, step: Callable[[], None]) -> dict[str, Any]:
        """(calls, bytes) of one call of `step` by kind, and the number of collectives that the groups' own numbers tell of beside."""
        self._below.clear()
        before, numbers = _seen(), _sequence_numbers()
        step()
        after = _seen()
        found: dict[str, list[int]] = {name: [0, 0] for name in KINDS}
        for description, (calls, payload) in [*_difference(after, before).items(), *self._below.items()]:
            found[kind(description)][0] += calls
            found[kind(description)][1] += payload
        return {**found, "unseen": _sequence_numbers() - numbers - sum(calls for calls, _ in found.values())}

    def _watched(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            before, self._inside = _seen(), True
            try:
                result = inner(*args, **kwargs)
            finally:
                self._inside = False
            if _seen() == before:
                group = functional._resolve_group_name(signature.bind(*args, **kwargs).arguments["group"])
                entry = self._below.setdefault(dist.distributed_c10d._resolve_process_group(group).group_desc, [0, 0])
                entry[0] += 1
                entry[1] += max(tensor.numel() * tensor.element_size() for tensor in (args[0], result))
            return result

        return watched


def _seen() -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for key, traffic in counted_traffic().items():
        description = key.partition("|")[0]
        calls, payload = found.get(description, (0, 0))
        found[description] = calls + traffic.num_collectives, payload + traffic.payload_bytes
    return found


def _difference(after: dict[str, tuple[int, int]], before: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    was = {name: before.get(name, (0, 0)) for name in after}
    return {name: (calls - was[name][0], payload - was[name][1]) for name, (calls, payload) in after.items()}


def _sequence_numbers() -> int:
    """The number of collectives that all groups of this process have run."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)

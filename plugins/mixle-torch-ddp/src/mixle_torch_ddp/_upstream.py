"""The names of torch that this plugin needs and that are private or changed between versions, with their guards."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixle_core import CapabilityError


def leave_out(module: nn.Module, raw_names: Iterable[str]) -> None:
    """Tell DistributedDataParallel, before it wraps `module`, which parameters and buffers somebody else reduces.

    Raises:
        CapabilityError: when this torch has no way to say so.
    """
    ignore = getattr(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model", None)
    if ignore is None:
        raise CapabilityError(f"torch {torch.__version__}: DistributedDataParallel cannot leave parameters out; use torch 2.11 to 2.14")
    names = list(raw_names)
    # torch asks for module and parameter joined by a dot, so for `.name` where the module is the root
    ignore(module, [*names, *(f".{name}" for name in names if "." not in name)])


def no_buffer_broadcast() -> dict[str, Any]:
    """The argument that keeps buffers out of every forward: torch 2.13 renamed it. Buffers are made equal when attaching."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}

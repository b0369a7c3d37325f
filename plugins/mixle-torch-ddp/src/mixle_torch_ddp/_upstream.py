"""The private name of torch that this plugin needs, with its guard."""

from __future__ import annotations

from collections.abc import Iterable

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
    ignore(module, list(raw_names))

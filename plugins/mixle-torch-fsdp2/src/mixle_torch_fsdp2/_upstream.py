"""The private names of torch that this plugin needs, with their guard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mixle_core import CapabilityError


def drop_accumulated(units: Iterable[Any]) -> None:
    """Drop what fully_shard accumulated in the dtype of its reduction.

    The public `reset_iter_state` says that it discards this and, in torch 2.13, leaves it.

    Raises:
        CapabilityError: when this torch keeps it elsewhere.
    """
    try:
        held = [p for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params]
        for parameter in held:
            if not hasattr(parameter, "unsharded_accumulated_grad"):
                raise AttributeError("unsharded_accumulated_grad")
            parameter.unsharded_accumulated_grad = None
    except AttributeError as error:
        raise CapabilityError(
            f"torch {torch.__version__}: fully_shard has no {error.name or error}, so an update cannot be given up; use torch 2.13 to 2.14"
        ) from error

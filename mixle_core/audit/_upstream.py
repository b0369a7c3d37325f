"""The private names of torch that a measurement needs, each with the reason and a guard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from mixle_core.errors import CapabilityError


@contextlib.contextmanager
def without_gradient_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put the hooks that somebody registered on parameters aside, those on accumulated gradients excepted, and back at the end.

    A hook of `register_hook` runs in `torch.autograd.grad` too and may reduce; torch has no public way to pass it over.

    Raises:
        CapabilityError: this torch keeps its hooks elsewhere.
    """
    kept = []
    for parameter in parameters:
        if not hasattr(parameter, "_backward_hooks"):
            raise CapabilityError(f"torch {torch.__version__} keeps no _backward_hooks on a tensor, which measuring before reduction needs")
        hooks = parameter._backward_hooks
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()  # autograd holds this very dict
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)

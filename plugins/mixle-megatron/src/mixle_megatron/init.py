"""Initial values: what Megatron's constructors would have drawn, from the seed and the parameter's name."""

from __future__ import annotations

from typing import Any

import torch

from mixle_core import Layouts


def fill(module: Any, layouts: Layouts) -> frozenset[str] | None:
    """Fill what `module` holds with the functions that its constructor was given; a parallel layer's bias is zero."""
    inits = getattr(module, "mixle_inits", None)
    if inits is None:
        return None
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    filled = set()
    with torch.no_grad():
        for name in layouts.parameters:
            local = name.rpartition(".")[2]
            parameter = getattr(module, local)
            if local in inits:
                inits[local](parameter)
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                parameter.zero_()
            else:
                continue
            filled.add(name)
    return frozenset(filled) or None

"""Whether blocks are a tensor exactly: every element in one block, none in two."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size)."""


def covers(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """What is wrong with blocks as a partition of a tensor; None when nothing is.

    Exact for any blocks; of a tensor without elements, each must be the whole. For blocks in a grid the time is that of sorting them.
    """
    dims = len(shape)
    total, volume = math.prod(shape), 0
    for offset, size in boxes:
        if len(offset) != dims or len(size) != dims:
            return f"a chunk with {len(offset)} offsets and {len(size)} sizes for {dims} dims"
        for start, extent, whole in zip(offset, size, shape, strict=True):
            if start + extent > whole:
                return f"a chunk at {list(offset)} of shape {list(size)} reaches out of shape {list(shape)}"
        elements = math.prod(size)
        if not elements and size != shape:
            return f"a chunk at {list(offset)} of shape {list(size)}, without elements"
        volume += elements
    if volume != total:
        return f"its chunks have {volume} elements, the tensor {total}"
    if total and not _tiles(shape, list(boxes), 0):
        return "its chunks overlap, and leave elements out"
    return None


def _tiles(shape: tuple[int, ...], boxes: list[Box], dim: int) -> bool:
    """Whether boxes, all of which span one slab of the dims before `dim`, tile it: a sweep along `dim`."""
    if len(boxes) == 1:
        offset, size = boxes[0]
        return not any(offset[dim:]) and size[dim:] == shape[dim:]
    if dim == len(shape):
        return False  # two boxes with the same elements
    order = sorted(boxes, key=lambda box: box[0][dim])
    edge, taken = 0, 0
    active: list[Box] = []
    while edge < shape[dim]:
        while taken < len(order) and order[taken][0][dim] == edge:
            active.append(order[taken])
            taken += 1
        if not active:
            return False
        # up to the next place where a box ends or begins, the same boxes lie side by side
        end = min(offset[dim] + size[dim] for offset, size in active)
        if taken < len(order):
            end = min(end, order[taken][0][dim])
        if not _tiles(shape, active, dim + 1):
            return False
        edge = end
        active = [box for box in active if box[0][dim] + box[1][dim] > edge]
    return True

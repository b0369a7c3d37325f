"""Strict mode: the collectives that were made, against what the table predicts and what owners say they made."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mixle_core.errors import CapabilityError, LedgerError, explain_failure
from mixle_core.ownership import OwnershipTable, Row
from mixle_core.plan import ParallelPlan, mesh_axes
from mixle_core.runtime._upstream import gradient_hooks

if TYPE_CHECKING:
    from mixle_core.runtime.contracts import Owner

_REDUCES = ("allreduce", "reduce_scatter", "_reduce_scatter", "reduce")
_CHANGES = (*_REDUCES, "broadcast", "scatter")
"""Operations that write over what they are given, or over what comes out beside it."""


_TELLING_BYTES = 4096


@attrs.frozen
class _Announced:
    """What an owner says of one collective: the parameters whose gradients it reduces, and the bytes it hands over."""

    owner: str
    axes: tuple[str, ...]
    names: tuple[str, ...]
    payload_bytes: int
    part_of: Hashable


@attrs.frozen
class _Seen:
    """A collective that this process made on a group of an owner."""

    group: str
    payload_bytes: int


def require_announcing(owners: Mapping[str, Owner]) -> None:
    """Strict mode needs owners that announce their collectives.

    Raises:
        CapabilityError: naming the first that does not.
    """
    mute = sorted(name for name, owner in owners.items() if not getattr(owner, "announces", False))
    if mute:
        raise CapabilityError(
            f"strict: {mute[0]} does not announce its collectives (Mesh.announce), so they cannot be compared with the table; train "
            "without strict, or with owners that do"
        )


class Watch:
    """Sees every collective of this process between two updates, and judges them when the update ends.

    Three things are compared: what the table predicts (each used parameter once over each stage of its row), what the owner
    announced (the parameters and bytes of each collective), and the calls that were really made on its process groups. Calls
    on groups of others count where they write over a gradient.

    Args:
        apart: what the descriptions of this model's process groups end with.
        parameters: logical name -> parameter, as it is trained on this rank.
    """

    def __init__(self, table: OwnershipTable, plan: ParallelPlan, rank: int, apart: str, parameters: Mapping[str, torch.Tensor]) -> None:
        self._plan = plan
        self._apart = apart
        self._rows = {row.name: row for row in table.rows if row.held_by(plan, rank)}
        self._parameters = {name: parameters[name] for name in self._rows}
        self._owners = {row.owner for row in table.rows}
        self._hooks = {name: gradient_hooks(parameter) for name, parameter in self._parameters.items()}
        sizes = {name: math.prod(row.local_shape) * _itemsize(row) for name, row in self._rows.items()}
        here = {name: stop - start for name, parameter in self._parameters.items() for start, stop in [_memory(parameter)]}
        # small ones are as large as anybody's numbers
        self._alike = {size: name for held in (sizes, here) for name, size in held.items() if size >= _TELLING_BYTES}
        self._alike |= {sum(held.values()): "all gradients" for held in (sizes, here)}
        self._announced: list[_Announced] = []
        self._seen: list[_Seen] = []
        self._foreign: list[str] = []

    def announce(self, owner: str, axes: Iterable[str], names: Iterable[str], payload_bytes: int, part_of: Hashable = None) -> None:
        """Note what an owner says of one collective, as `Mesh.announce`."""
        self._announced.append(_Announced(owner, tuple(axes), tuple(names), payload_bytes, part_of))

    def saw(self, operation: str, group: dist.ProcessGroup, payload_bytes: int, tensors: Sequence[torch.Tensor]) -> None:
        """Note one collective of this process, before it is made."""
        if not operation.startswith((*_CHANGES, "allgather", "_allgather")):
            return
        ours = self._apart and group.group_desc.endswith(self._apart)
        if ours and group.group_desc.split(":")[1] in self._owners:
            if operation.startswith(_REDUCES):
                self._seen.append(_Seen(group.group_desc, payload_bytes))
            return
        where = f"{operation} over group {group.group_desc!r} of {group.size()} ranks"
        touched = self._gradients_in(tensors) if operation.startswith(_CHANGES) else []
        if touched:
            self._foreign.append(f"{_few(touched)}: {where} wrote over the gradient, beside {self._owner_of(touched[0])}")
        elif not group.group_desc.startswith("mixle:"):
            alike = next((self._alike[size] for size in map(_num_bytes, tensors) if size in self._alike), None)
            if alike is not None:
                self._foreign.append(
                    f"{alike}: {where} took as many bytes as the gradient has: it looks like a reduction by hand, of a copy"
                )

    def drop(self) -> None:
        """Forget the calls of an update that is over or given up. What wrote over gradients stays until it is judged."""
        self._announced.clear()
        self._seen.clear()

    def late(self, update: int) -> LedgerError | None:
        """What wrote over gradients after the update ended, before they were dropped."""
        found, self._foreign = self._foreign, []
        if not found:
            return None
        what = f"update {update}: {len(found)} collectives on gradients after finish(), whose result the optimizer stepped with"
        return LedgerError(explain_failure(what, found, "take them out: gradients are final when finish() returns"))

    def judge(self, used: Collection[str], update: int) -> None:
        """Compare the calls of one update.

        Args:
            used: parameters that have a gradient.

        Raises:
            LedgerError: naming each parameter, or the group and bytes, of what is too much, too little, or elsewhere.
        """
        announced, seen, foreign = list(self._announced), list(self._seen), list(self._foreign)
        self.drop()
        self._foreign.clear()
        found = [*foreign, *self._hooked(), *self._against_table(announced, set(used)), *self._against_calls(announced, seen)]
        if found:
            raise LedgerError(
                explain_failure(
                    f"update {update}: {len(found)} differences between the collectives that were made and the table",
                    found,
                    "leave gradients to their owners: take out the hook or call that is named, or report the owner's fault to its plugin",
                )
            )

    def _hooked(self) -> list[str]:
        now = {name: gradient_hooks(parameter) for name, parameter in self._parameters.items()}
        added = [name for name, number in now.items() if number > self._hooks[name]]
        return [f"{_few(added)}: a gradient hook was put on it since attach"] if added else []

    def _against_table(self, announced: Sequence[_Announced], used: set[str]) -> list[str]:
        """Every used parameter once over every stage of its row, with as many bytes as it has."""
        reductions: dict[tuple[str, tuple[str, ...]], set[Hashable]] = {}
        odd = []
        for number, call in enumerate(announced):
            axes = tuple(axis for axis in call.axes if self._plan.size(axis) > 1)
            for name in call.names:
                reductions.setdefault((name, axes), set()).add(number if call.part_of is None else ("part of", call.part_of))
            odd += self._wrong_size(call, axes)
        wanted = {(name, stage) for name, row in self._rows.items() for stage in row.stages}
        for (name, axes), times in reductions.items():
            if (name, axes) not in wanted:
                said = f"{self._owner_of(name)} reduced it over {_over(axes)}, which is not in its row" if name in self._rows else "unknown"
                odd.append(f"{name}: {said}")
            elif len(times) > 1:
                odd.append(f"{name}: reduced {len(times)} times over {_over(axes)} by {self._owner_of(name)}")
        missing: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for name, stage in sorted(wanted - reductions.keys()):
            if name in used:
                missing.setdefault((self._owner_of(name), stage), []).append(name)
        odd += [f"{_few(names)}: not reduced over {_over(stage)} by {owner}" for (owner, stage), names in missing.items()]
        return odd

    def _wrong_size(self, call: _Announced, axes: tuple[str, ...]) -> list[str]:
        """The first stage takes whole gradients; where what comes out stays sharded, rows are added for equal shards."""
        rows = [row for row in (self._rows.get(name) for name in call.names) if row is not None and row.stages and row.stages[0] == axes]
        if len(rows) < len(call.names):
            return []
        least = sum(math.prod(row.local_shape) * _itemsize(row) for row in rows)
        padded = any(set(axes) & set(row.stored) for row in rows)
        if call.payload_bytes < least or (call.payload_bytes > least and not padded):
            return [f"{_few(call.names)}: {call.payload_bytes} bytes handed over for {least} bytes of gradients by {call.owner}"]
        return []

    def _against_calls(self, announced: Sequence[_Announced], seen: Sequence[_Seen]) -> list[str]:
        """What was announced is what was made: on each group, calls of the same sizes."""
        said: dict[str, list[_Announced]] = {}
        for call in announced:
            said.setdefault(self._group_name(call.owner, call.axes), []).append(call)
        odd = []
        for group in sorted({*said, *(call.group for call in seen)}):
            made = Counter(call.payload_bytes for call in seen if call.group == group)
            for call in said.get(group, ()):
                if made[call.payload_bytes]:
                    made[call.payload_bytes] -= 1
                else:
                    what = f"{call.owner} announced {call.payload_bytes} bytes over {_over(call.axes)}, and no such call was made"
                    odd.append(f"{_few(call.names)}: {what}")
            owner, axes = group.split(":")[1:3]
            for size, number in sorted(made.items()):
                if number:
                    alike = [name for name, row in self._rows.items() if math.prod(row.local_shape) * _itemsize(row) == size]
                    like = f", as many as the gradient of {_few(alike)} has" if alike else ""
                    odd.append(f"{number} call{'s' * (number > 1)} of {owner} over {axes} that it did not announce: {size} bytes{like}")
        return odd

    def _group_name(self, owner: str, axes: Iterable[str]) -> str:
        """How the process group of `owner` over `axes` is described."""
        wanted = set(axes)
        active = [axis for axis in mesh_axes(wanted) if axis in wanted and self._plan.size(axis) > 1]
        return f"mixle:{owner}:{'.'.join(active)}{self._apart}"

    def _owner_of(self, name: str) -> str:
        return self._rows[name].owner

    def _gradients_in(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """Parameters whose gradient lies in the memory of one of `tensors`."""
        ranges = [_memory(tensor) for tensor in tensors]
        found = []
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            start, stop = _memory(gradient)
            if start < stop and any(start < high and low < stop for low, high in ranges):
                found.append(name)
        return found


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), local.data_ptr() + local.numel() * local.element_size()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _itemsize(row: Row) -> int:
    return 4 if row.dtype == "torch.float32" else row.itemsize


def _over(axes: Iterable[str]) -> str:
    return " x ".join(axes)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""This rank's place in the plan, the one factory of process groups, and the count of what goes over them."""

from __future__ import annotations

import atexit
import datetime
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mixle_core.errors import AgreementError, CapabilityError, MixleError, UsageError
from mixle_core.plan import AXES, EXPERT_AXES, ParallelPlan, mesh_axes
from mixle_core.runtime._upstream import default_store, in_memory_store, observe_collectives
from mixle_core.runtime.agreement import digest, first_difference

if TYPE_CHECKING:
    from mixle_core.runtime.watch import Watch

CONTROL = "control"
"""Owner label of the groups that carry decisions, not gradients."""


@attrs.frozen
class Traffic:
    """Collectives and payload bytes, per rank, since the last look."""

    num_collectives: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_collectives + other.num_collectives, self.payload_bytes + other.payload_bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_collectives - other.num_collectives, self.payload_bytes - other.payload_bytes)


class _Counter:
    """Counts by the description of the process group; one for the whole process."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = {}
        self.watching: list[Watch] = []
        self.installed = False

    def install(self) -> None:
        if not self.installed:
            observe_collectives(self._observe)
            self.installed = True

    def _observe(self, operation: str, group: dist.ProcessGroup, payload_bytes: int, tensors: Callable[[], list[torch.Tensor]]) -> None:
        entry = self.counts.setdefault(f"{group.group_desc}|{operation}", [0, 0])
        entry[0] += 1
        entry[1] += payload_bytes
        for watch in self.watching:
            watch.saw(operation, group, payload_bytes, tensors())


_counter = _Counter()


def counted_traffic(prefix: str = "") -> dict[str, Traffic]:
    """`group description|operation` -> traffic of this process so far, for descriptions that start with `prefix`.

    A group that mixle made is described as `mixle:OWNER:AXES`. Counting starts with the first mesh of the process.
    """
    return {key: Traffic(*entry) for key, entry in sorted(_counter.counts.items()) if key.startswith(prefix)}


def start_processes(plan: ParallelPlan, device: torch.device | None = None) -> torch.device:
    """Make sure the default process group fits the plan; return the device to train on.

    A launched world (RANK and WORLD_SIZE in the environment) is joined with the plan's timeout. A plan for one process
    needs no process group.

    Raises:
        CapabilityError: the world has another size than the plan.
        UsageError: the plan needs several processes and none were launched; incomplete launch variables.
    """
    device = device or _default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        launched = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ}
        world = launched.get("WORLD_SIZE", "1")
        if not world.isdigit():
            raise UsageError(f"WORLD_SIZE={world!r} in the environment: expected a number of processes")
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in launched]
        if int(world) > 1 and missing:
            raise UsageError(
                f"{', '.join(missing)} missing from the environment beside WORLD_SIZE={world}; launch with torchrun or `mixle train`"
            )
        if int(world) > 1:
            rank = launched["RANK"]
            if not rank.isdigit() or int(rank) >= int(world):
                raise UsageError(f"RANK={rank!r} in the environment: expected 0 to {int(world) - 1} beside WORLD_SIZE={world}")
            # joined before the plan is compared with it, so that a rank with another plan can tell the others
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=plan.timeout_s))
            atexit.register(_leave_processes)
        elif plan.world_size == 1:
            return device
        else:
            _refuse_world(plan, 1, "this process alone")
    if dist.get_world_size() != plan.world_size:
        _refuse_world(plan, dist.get_world_size(), "the process group")
    for name, value in (("RANK", dist.get_rank()), ("WORLD_SIZE", dist.get_world_size())):
        if os.environ.get(name, str(value)) != str(value):
            raise UsageError(f"{name}={os.environ[name]} in the environment, but the process group says {value}; unset the stray variable")
    return device


def _leave_processes() -> None:
    """At exit, from the process group that was joined here: gloo's threads would still run while the interpreter goes away.

    Others are left alone: to leave NCCL's groups is a collective of its own, for which a rank that failed would wait.
    """
    _groups.clear()
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _default_device() -> torch.device:
    local = os.environ.get("LOCAL_RANK", "0")
    if not local.isdigit():
        raise UsageError(f"LOCAL_RANK={local!r} in the environment: expected the number of this process on its machine")
    return torch.device("cuda", int(local)) if torch.cuda.is_available() else torch.device("cpu")


def _refuse_world(plan: ParallelPlan, found: int, where: str) -> None:
    raise CapabilityError(
        f"world size is {found} ({where}), the plan needs {plan.world_size} ({plan.describe()}); "
        f"launch with: {launch_command(plan.world_size)}"
    )


def launch_command(num_ranks: int) -> str:
    """The command that runs this program once more, on `num_ranks` ranks: with as many on a machine as it has GPUs, if it has any."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        program = ["-m", main.__spec__.name.removesuffix(".__main__"), *sys.argv[1:]]  # type: ignore[union-attr]
    else:
        program = list(sys.argv) if hasattr(main, "__file__") else ["SCRIPT.py"]
    script = shlex.join(program)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and num_ranks > gpus:
        nodes = f"--nnodes {-(-num_ranks // gpus)} --nproc-per-node {gpus} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        return f"torchrun {nodes} {script}"
    return f"torchrun --nproc-per-node {num_ranks} {script}"


_serials = itertools.count()
"""Numbers the meshes over several ranks; alike on all ranks, since they make them together."""


class Mesh:
    """Where this rank stands in the plan, and the process groups of one attached model.

    Every group is made here, with the plan's timeout, and belongs to one owner, so that its traffic can be attributed.
    All ranks ask for the same groups in the same order.
    """

    def __init__(self, plan: ParallelPlan, device: torch.device, *, strict: bool = False) -> None:
        self.plan = plan
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coordinates = plan.coordinates(self.rank)
        self.position = {**self.coordinates, **plan.coordinates(self.rank, EXPERT_AXES)}
        self.order = 0  # a hash of what owners saw called: equal on every rank when an update ends, or it is an error
        self.used: set[str] = set()  # what owners saw backwards of this rank use since the last update
        self.watch: Watch | None = None
        self._serial = 0
        if plan.world_size > 1:
            _counter.install()
            self._serial = next(_serials)
        # what is watched call by call must not meet the calls of another model of the process
        self.apart = f":strict{self._serial}" if strict else ""

    def group(
        self, axes: Iterable[str], owner: str, *, holders: Mapping[str, Sequence[int]] | None = None, alone: bool = False
    ) -> dist.ProcessGroup | None:
        """The group of `owner` whose ranks differ from this one only on `axes`; None when that is this rank alone.

        Args:
            axes: of the mesh, or of its folded expert view.
            holders: axis -> positions that are in the group; the others are in none. All ranks ask for it.
            alone: in place of None, a real group of this rank alone.
        """
        wanted = set(axes)
        active = [axis for axis in mesh_axes(wanted) if axis in wanted and self.plan.size(axis) > 1]
        held = {axis: tuple(holders[axis]) for axis in active if holders and axis in holders}
        ranks = _members(self.plan, self.rank, active, held)
        found = None
        if len(ranks) > 1:
            name = ".".join(f"{axis}[{','.join(map(str, held[axis]))}]" if axis in held else axis for axis in active)
            found = _shared_group(self.plan, ranks, active, held, f"mixle:{owner}:{name}{'' if owner == CONTROL else self.apart}")
        return solo_group(owner) if found is None and alone else found

    def announce(self, owner: str, axes: Iterable[str], names: Iterable[str], payload_bytes: int, *, part_of: Hashable = None) -> None:
        """Say, in strict mode, which gradients the collective reduces that `owner` is about to make over `axes`.

        Args:
            payload_bytes: handed over by this rank, padding included.
            part_of: equal for the terms of one reduction that takes several collectives.
        """
        if self.watch is not None:
            self.watch.announce(owner, axes, names, payload_bytes, part_of)

    def announcer(self, owner: str, axes: Iterable[str], names: Sequence[str]) -> Callable[[Sequence[int], int], None]:
        """What `reduce_coalesced` tells of its collectives: `announce` for the tensors at some places of `names`."""
        return lambda places, payload_bytes: self.announce(owner, axes, [names[place] for place in places], payload_bytes)

    def _start_watch(self, watch: Watch) -> None:
        """Let `watch` see every collective of this process, and what owners announce, until `_stop_watch`."""
        self.watch = watch
        _counter.watching.append(watch)

    def _stop_watch(self) -> None:
        """End what `_start_watch` began."""
        if self.watch is not None:
            _counter.watching.remove(self.watch)
            self.watch = None

    def world(self) -> dist.ProcessGroup | None:
        """The group of all ranks that carries decisions."""
        return self.group(AXES, CONTROL)

    def device_mesh(self, axes: Sequence[str], owner: str) -> DeviceMesh:
        """A torch DeviceMesh over `axes` (each above 1), built from this factory's groups."""
        groups = [self.group((axis,), owner) for axis in axes]
        if any(group is None for group in groups):
            raise UsageError(f"device_mesh over {', '.join(axes)}: each axis needs more than one rank")
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=tuple(axes))  # type: ignore[arg-type]
        ordered = [axis for axis in mesh_axes(axes) if axis in axes]
        ranks = torch.tensor(self.plan.group_ranks(self.rank, axes), dtype=torch.int).view([self.plan.size(axis) for axis in ordered])
        ranks = ranks.permute([ordered.index(axis) for axis in axes]).contiguous()
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(axes))  # type: ignore[arg-type]

    def size(self, axes: Iterable[str]) -> int:
        """Number of ranks over `axes`."""
        total = 1
        for axis in set(axes):
            total *= self.plan.size(axis)
        return total

    def all_reduce_control(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce a small tensor over all ranks, in place; what decides the same thing everywhere."""
        group = self.world()
        if group is not None:
            moved = values.to(self.device)
            dist.all_reduce(moved, op=op, group=group)
            values.copy_(moved)
        return values

    def leave_word(self, update: int, error: Exception) -> Exception:
        """Tell the others why this rank stops within `update`, or find out from their word why it had to."""
        if self.plan.world_size > 1:
            key = f"mixle/stopped/{self._serial}/{update}"
            try:
                store = default_store()
                if store.check([key]):
                    return UsageError(store.get(key).decode())
                store.set(key, f"rank {self.rank}: {_said(error)}")
            except RuntimeError:  # the store went with the process that held it
                return error
        return error

    def gather_objects(self, value: Any) -> list[Any]:
        """`value` of every rank, by rank. For set-up and for errors, not for steps."""
        group = self.world()
        if group is None:
            return [value]
        gathered: list[Any] = [None] * self.plan.world_size
        dist.all_gather_object(gathered, value, group=group)
        return gathered


_groups: dict[tuple[tuple[int, ...], str, float], dist.ProcessGroup | None] = {}
_groups_of: list[object] = []


def _members(plan: ParallelPlan, rank: int, axes: Sequence[str], held: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    ranks = plan.group_ranks(rank, axes)
    if not held:
        return ranks
    view = mesh_axes(axes)
    return tuple(r for r in ranks if all(plan.coordinates(r, view)[axis] in positions for axis, positions in held.items()))


def solo_group(owner: str) -> dist.ProcessGroup:
    """A real process group of this rank alone, for libraries that need one where nothing is to be sent. Not a collective."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=in_memory_store(), rank=0, world_size=1)
        atexit.register(_leave_processes)
    _forget_old_groups()
    key = ((dist.get_rank(),), f"mixle:{owner}.alone:", 0.0)  # nothing is sent, so it is not the owner's traffic
    found = _groups.get(key)
    if found is None:
        _groups[key] = found = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=key[1])
    return found


def gloo_group(owner: str, timeout_s: float) -> dist.ProcessGroup:
    """A group of all ranks over gloo, whatever the default group has, for what a thread beside the training sends. Collective at first."""
    _forget_old_groups()
    key = (tuple(range(dist.get_world_size())), f"mixle:{owner}:gloo", timeout_s)
    found = _groups.get(key)
    if found is None:
        limit = datetime.timedelta(seconds=timeout_s)
        _groups[key] = found = dist.new_group(backend="gloo", timeout=limit, group_desc=key[1])
    return found


def _forget_old_groups() -> None:
    if _groups_of != [dist.group.WORLD]:
        _groups.clear()
        _groups_of[:] = [dist.group.WORLD]


def _shared_group(
    plan: ParallelPlan, ranks: tuple[int, ...], axes: Sequence[str], held: Mapping[str, Sequence[int]], description: str
) -> dist.ProcessGroup | None:
    """Make a group, or take the one this process made before for the same purpose.

    Groups live as long as the default group. Every rank makes those of all ranks: torch names a group that only its members
    make by how many groups the process has, which differs between ranks as soon as a user made one for some of them.
    """
    _forget_old_groups()
    key = (ranks, description, plan.timeout_s)
    if key not in _groups:
        limit = datetime.timedelta(seconds=plan.timeout_s)
        for others in sorted({_members(plan, rank, axes, held) for rank in range(plan.world_size)}):
            group = dist.new_group(list(others), timeout=limit, group_desc=description)
            if others == ranks:
                _groups[key] = group if dist.get_rank() in ranks else None
    return _groups[key]


def reduce_scatter(
    output: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> Any:
    """Reduce `values` (dim 0: one piece per rank, concatenated) and keep this rank's piece in `output`.

    torch 2.13 renamed `reduce_scatter_tensor`, which warns since.
    """
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(output, values, op=op, group=group, async_op=async_op)


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, MixleError) else f"{type(error).__name__}: {error}"


def agree(document: Mapping[str, Any] | None, failure: Exception | None) -> None:
    """Compare `document` over the default process group, and let a failure on one rank fail everywhere.

    Every rank calls it once, also one that failed before it had a document, so nobody waits for a missing rank.

    Raises:
        AgreementError: naming the odd rank and the first difference, or the rank that failed and its error.
        Exception: this rank's own failure.
    """
    if not dist.is_initialized():
        if failure is not None:
            raise failure
        return
    mine = None if document is None else digest(document)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (mine, None if failure is None else _said(failure)))
    if failure is not None:
        raise failure
    failed = [(rank, text) for rank, (_, text) in enumerate(gathered) if text is not None]
    if failed:
        raise AgreementError(f"rank {failed[0][0]} could not prepare: {failed[0][1]}")
    if len({theirs for theirs, _ in gathered}) > 1:
        documents: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(documents, document)
        raise AgreementError(f"ranks prepared different things: {first_difference(documents)}; make them alike before training")


def raise_everywhere(mesh: Mesh, failure: Exception | None) -> None:
    """Raise on every rank what was found on any; each rank calls it at the same point."""
    texts = mesh.gather_objects(None if failure is None else _said(failure))
    if failure is not None:
        raise failure
    found = [(rank, text) for rank, text in enumerate(texts) if text is not None]
    if found:
        raise UsageError(f"rank {found[0][0]}: {found[0][1]}")


@contextmanager
def together(mesh: Mesh) -> Iterator[None]:
    """Let what fails inside on one rank fail on all of them, at its end. Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    raise_everywhere(mesh, failure)

"""Process groups, coordinates and counted traffic of a mesh, and what the launch variables may say."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

import mixle_core as mx
from mixle_core.runtime import Mesh, counted_traffic, reduce_scatter
from mixle_core.runtime.groups import start_processes
from mixle_core.testing import OwnsEverything, ToyLayout, run_ranks, toy_model

Plan = mx.ParallelPlan
CPU = torch.device("cpu")
TWO_BY_TWO = Plan(dp_shard=2, tp=2, timeout_s=17.0)


def timeout_of(group):
    return group._get_backend(CPU).options._timeout.total_seconds()


def groups_of_a_mesh():
    mesh = Mesh(TWO_BY_TWO, start_processes(TWO_BY_TWO))
    asked = {"tp": ("tp",), "dp": ("dp_shard",), "both": ("tp", "dp_shard"), "size one too": ("tp", "pp", "cp")}
    found = {}
    for name, axes in asked.items():
        group = mesh.group(axes, "mine")
        found[name] = (dist.get_process_group_ranks(group), group.group_desc, timeout_of(group))
    found["world"] = (dist.get_process_group_ranks(mesh.world()), mesh.world().group_desc, timeout_of(mesh.world()))
    same = mesh.group(("dp_shard", "tp"), "mine") is mesh.group(("tp", "dp_shard"), "mine")
    other = mesh.group(("tp",), "mine") is mesh.group(("tp",), "other")
    alone = mesh.group(("pp", "cp"), "mine"), mesh.group((), "mine")
    dist.barrier()
    return mesh.rank, mesh.coordinates, found, same, other, alone, mesh.size(("tp", "dp_shard", "cp"))


def test_groups_hold_the_ranks_that_differ_on_their_axes_and_have_the_timeout_of_the_plan():
    for outcome in run_ranks(groups_of_a_mesh, 4, timeout_s=60, group_timeout_s=60):
        rank, coordinates, found, same, other, alone, size = outcome.value
        dp, tp = divmod(outcome.rank, 2)
        assert rank == outcome.rank and coordinates == {"pp": 0, "dp_replicate": 0, "dp_shard": dp, "cp": 0, "tp": tp}
        assert found["tp"] == found["size one too"] == ([2 * dp, 2 * dp + 1], "mixle:mine:tp", 17.0)
        assert found["dp"] == ([tp, 2 + tp], "mixle:mine:dp_shard", 17.0)
        assert found["both"] == ([0, 1, 2, 3], "mixle:mine:dp_shard.tp", 17.0)
        assert found["world"] == ([0, 1, 2, 3], "mixle:control:dp_shard.tp", 17.0)
        assert same and not other and alone == (None, None) and size == 4


def groups_of_attach():
    mx.attach(toy_model(), Plan(dp_replicate=2, timeout_s=23.0), plugins={"toy": ToyLayout(), "double": OwnsEverything()})
    dist.barrier()
    return sorted((g.group_desc, timeout_of(g)) for g in dist.distributed_c10d._world.pg_map if g.group_desc.startswith("mixle"))


def test_every_group_that_attach_makes_has_the_timeout_of_the_plan():
    for outcome in run_ranks(groups_of_attach, 2, timeout_s=60):
        assert outcome.value == [("mixle:control:dp_replicate", 23.0), ("mixle:double:dp_replicate", 23.0)]


def traffic_of_two_owners():
    mesh = Mesh(TWO_BY_TWO, CPU)
    tp, both = mesh.group(("tp",), "first"), mesh.group(("dp_shard", "tp"), "second")
    values = torch.full((10,), float(mesh.rank))
    dist.all_reduce(values, group=tp)
    for _ in range(3):
        dist.all_reduce(torch.ones(7, dtype=torch.float64), group=both)
    reduce_scatter(torch.empty(2), torch.ones(4), tp)
    dist.all_gather([torch.empty(5) for _ in range(4)], torch.ones(5), group=both)
    dist.all_reduce(torch.ones(3))
    first, second = (
        {key: (t.num_collectives, t.payload_bytes) for key, t in counted_traffic(f"mixle:{name}:").items()} for name in ("first", "second")
    )
    return values.tolist(), first, second, counted_traffic("mixle:thi")


def test_traffic_is_counted_to_the_byte_and_belongs_to_the_owner_of_its_group():
    """Payload is the larger of what goes in and what comes out on this rank."""
    for outcome in run_ranks(traffic_of_two_owners, 4, timeout_s=60):
        values, first, second, third = outcome.value
        assert values == [float(1 if outcome.rank < 2 else 5)] * 10 and third == {}
        (scattered,) = [key for key in first if "reduce_scatter" in key]
        assert first == {"mixle:first:tp|allreduce": (1, 40), scattered: (1, 16)}
        assert second == {"mixle:second:dp_shard.tp|allreduce": (3, 3 * 56), "mixle:second:dp_shard.tp|allgather": (1, 80)}


def device_meshes():
    mesh = Mesh(TWO_BY_TWO, CPU)
    one, two = mesh.device_mesh(("tp",), "mine"), mesh.device_mesh(("dp_shard", "tp"), "mine")
    turned = mesh.device_mesh(("tp", "dp_shard"), "mine")
    made_here = [
        one.get_group() is mesh.group(("tp",), "mine"),
        two.get_group("dp_shard") is mesh.group(("dp_shard",), "mine"),
        two.get_group("tp") is one.get_group(),
        turned.get_group("tp") is one.get_group(),
    ]
    places = [(m.mesh.tolist(), list(m.get_coordinate()), m.mesh_dim_names) for m in (one, two, turned)]
    with pytest.raises(mx.UsageError, match="device_mesh over tp, cp: each axis needs more than one rank"):
        mesh.device_mesh(("tp", "cp"), "mine")
    dist.barrier()
    return made_here, places


def test_a_device_mesh_consists_of_the_groups_of_the_factory_in_the_order_asked_for():
    for outcome in run_ranks(device_meshes, 4, timeout_s=60):
        made_here, (one, two, turned) = outcome.value
        dp, tp = divmod(outcome.rank, 2)
        assert made_here == [True] * 4
        assert one == ([2 * dp, 2 * dp + 1], [tp], ("tp",))
        assert two == ([[0, 1], [2, 3]], [dp, tp], ("dp_shard", "tp"))
        assert turned == ([[0, 2], [1, 3]], [tp, dp], ("tp", "dp_shard"))


def attach_here():
    try:
        mx.attach(toy_model(), Plan(dp_replicate=2), plugins={"double": OwnsEverything()})
    except mx.MixleError as error:
        return type(error).__name__, str(error)
    dist.barrier()
    return None, ""


@pytest.mark.parametrize(
    ("variables", "texts"),
    [
        ({"WORLD_SIZE": "5"}, ["WORLD_SIZE=5 in the environment, but the process group says 2; unset the stray variable"] * 2),
        (
            {"RANK": "0"},
            [
                "rank 1 could not prepare: RANK=0 in the environment, but the process group says 1; unset the stray variable",
                "RANK=0 in the environment, but the process group says 1; unset the stray variable",
            ],
        ),
        ({"NODE_RANK": "3", "GROUP_RANK": "x"}, ["", ""]),
    ],
)
def test_launch_variables_that_contradict_the_process_group_are_named(variables, texts):
    """C60: within seconds, on every rank; variables that mixle does not read disturb nothing."""
    outcomes = run_ranks(attach_here, 2, timeout_s=20, env=variables)
    assert [outcome.value[1] for outcome in outcomes] == texts


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        (
            {"WORLD_SIZE": "2"},
            mx.UsageError,
            "RANK, MASTER_ADDR, MASTER_PORT missing from the environment beside WORLD_SIZE=2; launch with",
        ),
        ({"WORLD_SIZE": "2", "RANK": "1"}, mx.UsageError, "MASTER_ADDR, MASTER_PORT missing from the environment beside WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, mx.UsageError, "WORLD_SIZE='two' in the environment: expected a number of processes"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            mx.UsageError,
            "RANK='2' in the environment: expected 0 to 1 beside WORLD_SIZE=2",
        ),
        ({"RANK": "0"}, mx.CapabilityError, r"world size is 1 \(this process alone\), the plan needs 2 \(dp_replicate=2\)"),
    ],
)
def test_incomplete_launch_variables_are_named_before_anything_waits(monkeypatch, variables, error, text):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=text):
        start_processes(Plan(dp_replicate=2), CPU)
    assert not dist.is_initialized()


def test_a_local_rank_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(mx.UsageError, match="LOCAL_RANK='first' in the environment: expected the number of this process"):
        start_processes(Plan())


def join_a_launched_world():
    """What a launcher leaves: no process group yet, the variables in the environment."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port[0]))
    dist.destroy_process_group()
    start_processes(Plan(dp_replicate=2, timeout_s=19.0), CPU)
    return dist.get_rank(), dist.get_world_size(), timeout_of(dist.group.WORLD)


def test_a_launched_world_is_joined_with_the_timeout_of_the_plan():
    ranks = run_ranks(join_a_launched_world, 2, timeout_s=60)
    assert [outcome.value for outcome in ranks] == [(0, 2, 19.0), (1, 2, 19.0)]

"""Blocks of whole tensors, and who names them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mixle_core as mx
from mixle_core.ownership import Claim, make_row
from mixle_core.runtime import StateEntry, blocks_of, flat_blocks, load_state, save_state

Plan = mx.ParallelPlan


def row(shape: tuple[int, ...], roles: dict[str, mx.Role], plan: Plan) -> mx.Row:
    layout = mx.ParameterLayout("w", shape, "torch.float32", 4, trainable=True, roles=roles)
    return make_row(plan, layout, "someone", Claim(owner=lambda: None, parameters=["w"], axes={"dp_shard", "tp", "pp"}, backend="b"))


def cut(whole: torch.Tensor, role: mx.Shard, number: int, index: int) -> torch.Tensor:
    pieces = whole.split(list(role.parts), role.dim) if role.parts else (whole,)
    return torch.cat([piece.chunk(number, role.dim)[index] for piece in pieces], role.dim)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], mx.Shard, int]:
    tp = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    dim = draw(st.integers(0, len(shape) - 1))
    parts = [tp * draw(st.integers(1, 2)) for _ in range(draw(st.integers(1, 3)))]
    shape[dim] = sum(parts)
    return tuple(shape), mx.Shard(dim, parts=tuple(parts) if len(parts) > 1 else None), tp


@given(cuts(), st.data())
def test_ranges_of_all_ranks_put_together_are_the_whole_tensor(what, data):
    shape, role, tp = what
    plan = Plan(tp=tp)
    described = row(shape, {"tp": role}, plan)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    found, times = torch.full(shape, -1.0), torch.zeros(shape)
    for index in range(tp):
        local = cut(whole, role, tp, index)
        assert tuple(local.shape) == described.local_shape
        blocks = blocks_of(described, plan, {"tp": index})
        ends = sorted(data.draw(st.lists(st.integers(0, local.numel()), max_size=4)))
        for start, stop in itertools.pairwise([0, *ends, local.numel()]):
            flat = local.reshape(-1)[start:stop]
            for block in flat_blocks(blocks, described.local_shape, start, stop):
                at = tuple(slice(o, o + n) for o, n in zip(block.offset, block.size, strict=True))
                found[at] = block.of(flat)
                times[at] += 1
    assert torch.equal(found, whole)
    assert torch.equal(times, torch.ones(shape))


def test_a_block_is_a_view_of_what_trains():
    described = row((4, 2), {"tp": mx.Shard(0, parts=(2, 2))}, Plan(tp=2))
    local = torch.zeros(2, 2)
    first, second = blocks_of(described, Plan(tp=2), {"tp": 1})
    assert (first.offset, second.offset) == ((1, 0), (3, 0))
    second.of(local).fill_(5.0)
    assert local.tolist() == [[0.0, 0.0], [5.0, 5.0]]
    (block,) = flat_blocks((first, second), (2, 2), 3, 4)
    block.of(local.reshape(-1)[3:4]).fill_(7.0)
    assert (block.offset, local.tolist()) == ((3, 1), [[0.0, 0.0], [5.0, 7.0]])


def test_a_number_has_one_block():
    described = row((), {}, Plan())
    (block,) = blocks_of(described, Plan(), {})
    assert (block.offset, block.size) == ((), ())
    assert [b.offset for b in flat_blocks((block,), (), 0, 1)] == [()]


class Names:
    """Names the state of one parameter, or whatever it is told to answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @mx.hookimpl
    def save_state(self, model, optimizers, ownership):
        return self.answer

    @mx.hookimpl
    def load_state(self, model, optimizers, ownership, reader):
        return self.answer


ENTRY = StateEntry("weight", "parameter", (2, 2), (0, 0), torch.zeros(2, 2))


def attached(**plugins: Any) -> mx.Reduction:
    return mx.attach(nn.Linear(2, 2, bias=False), Plan(), plugins=mx.load_plugins([], extra=plugins))


def test_entries_come_in_the_order_of_their_keys():
    entries = (
        ENTRY,
        StateEntry("weight", "exp_avg", (2, 2), (1, 0), torch.zeros(1, 2)),
        StateEntry("weight", "exp_avg", (2, 2), (0, 0), torch.zeros(1, 2)),
    )
    found = save_state(attached(one=Names(entries)), {})
    assert [(entry.kind, entry.offset) for entry in found] == [("exp_avg", (0, 0)), ("exp_avg", (1, 0)), ("parameter", (0, 0))]


def test_two_plugins_that_name_one_parameter_are_an_error_with_both_names():
    with pytest.raises(mx.OwnershipError, match=r"weight: claimed by one .* and two .*"):
        save_state(attached(one=Names((ENTRY,)), two=Names((ENTRY,))), {})


@pytest.mark.parametrize("answer", [[ENTRY], ("weight",), {"weight": 1}], ids=["list", "names", "mapping"])
def test_what_is_no_entries_is_refused(answer):
    with pytest.raises(mx.PluginError, match="save_state"):
        save_state(attached(one=Names(answer)), {})


def test_what_was_loaded_are_names():
    assert load_state(attached(one=Names(frozenset({"weight"}))), {}, None) == {"weight"}
    assert load_state(attached(one=Names(None)), {}, None) == frozenset()
    with pytest.raises(mx.PluginError, match="load_state"):
        load_state(attached(one=Names(["weight"])), {}, None)

"""Each pair of lies is one collective whose forward value and gradient equal the single-process ones; the others are refused."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from mixle_dtensor_tp.collectives import conversion

from mixle_core import CapabilityError, Replica, Shard, Term
from mixle_core.audit import relative_error
from mixle_core.testing import run_ranks

EXACT = {
    ("complete", "partial"),
    ("complete", "shard"),
    ("shard", "partial"),
    ("shard", "complete"),
    ("term", "complete"),
    ("term", "partial"),
    ("term", "shard"),
}
KINDS = ("complete", "partial", "shard", "term")
REFUSED = sorted(set(itertools.permutations(KINDS, 2)) - EXACT)
CASES = [(*pair, dim, contiguous) for pair in sorted(EXACT) for dim in (0, 1, -1) for contiguous in (False, True)]


def lie(kind, dim):
    return {"complete": Replica("complete"), "partial": Replica("partial"), "shard": Shard(dim), "term": Term()}[kind]


def drawn_terms(seed):
    """Per rank one term, of shape [4, 8, 12] and not contiguous, equal wherever they are drawn."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(12, 8, 4, generator=generator).permute(2, 1, 0) for _ in range(dist.get_world_size())]


def held(kind, dim, terms):
    """What this rank holds of the sum of `terms` when it lies as `kind`."""
    whole, rank = torch.stack(terms).sum(0), dist.get_rank()
    return {"term": terms[rank], "shard": whole.chunk(len(terms), dim)[rank]}.get(kind, whole)


def gradient_held(kind, dim, terms):
    """The gradient of an activation that lies as `kind`: whole, this rank's term of it, or this rank's slice."""
    return held({"partial": "term", "term": "complete"}.get(kind, kind), dim, terms)


def errors_on_rank():
    """(source, target, dim, contiguous) -> errors of value and gradient, and whether what was passed in kept its values."""
    found = {}
    for source, target, dim, contiguous in CASES:
        convert = conversion(lie(source, dim), lie(target, dim), dist.group.WORLD, "here")
        values, gradients = drawn_terms(1), drawn_terms(2)
        before, gradient = held(source, dim, values).clone(), gradient_held(target, dim, gradients).clone()
        if contiguous:
            before, gradient = before.contiguous(), gradient.contiguous()
        kept = before.clone(), gradient.clone()
        after = convert(before.requires_grad_())
        after.backward(gradient)
        found[source, target, dim, contiguous] = (
            relative_error(after.detach(), held(target, dim, values)),
            relative_error(before.grad, gradient_held(source, dim, gradients)),
            torch.equal(before.detach(), kept[0]) and torch.equal(gradient, kept[1]),
        )
    return found


@functools.cache
def errors(world_size):
    return [outcome.value for outcome in run_ranks(errors_on_rank, world_size, timeout_s=60, group_timeout_s=20)]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("source", "target", "dim", "contiguous"), CASES)
def test_value_and_gradient_equal_one_process_and_what_was_passed_in_stays(source, target, dim, contiguous, world_size):
    seen = [of_rank[source, target, dim, contiguous] for of_rank in errors(world_size)]
    assert len(seen) == world_size
    assert all(value <= 1e-6 and gradient <= 1e-6 and kept for value, gradient, kept in seen), seen


@pytest.mark.parametrize(("source", "target"), REFUSED)
def test_a_pair_without_an_exact_conversion_is_refused_by_name(source, target):
    with pytest.raises(CapabilityError) as refused:
        conversion(lie(source, 1), lie(target, 1), None, "output of blocks.0")
    assert str(refused.value).startswith(f"output of blocks.0: no exact conversion from {lie(source, 1)} to {lie(target, 1)};")
    assert all(f"{a} to {b}" in str(refused.value) for a, b in EXACT)


def test_slices_along_two_dims_are_refused():
    with pytest.raises(CapabilityError, match="no exact conversion from Shard"):
        conversion(Shard(0), Shard(1), None, "here")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_to_do_between_equal_lies(kind):
    assert conversion(lie(kind, 1), lie(kind, 1), None, "here") is None


@pytest.mark.parametrize("cut", [Shard(-1, unit=4), Shard(-1, parts=(8, 8))], ids=["unit", "parts"])
@pytest.mark.parametrize("other", [Replica("complete"), Term()], ids=["complete", "term"])
def test_activations_know_no_units_and_no_parts(cut, other):
    source, target = (cut, other) if other == Replica("complete") else (other, cut)
    with pytest.raises(CapabilityError, match="here: an activation is cut into equal slices; declare Shard"):
        conversion(source, target, None, "here")

"""What the installed megatron-fsdp does, on gloo with the names of torch.cuda redirected: a fix upstream fails a test here."""

from __future__ import annotations

import functools

import pytest
import torch
from mixle_megatron_fsdp import measure
from mixle_megatron_fsdp._upstream import redirect_cuda

from mixle_core.testing import run_ranks

EXACT = 1e-5
DATA_PARALLEL = {
    "one backward": {},
    "three backwards": {"backwards": 3},
    "three backwards, default synchronisation": {"backwards": 3, "auto_sync": True},
    "three backwards, tied": {"backwards": 3, "tied": True},
    "optim, no_sync": {"backwards": 3, "strategy": "optim"},
    "optim_grads, no_sync": {"backwards": 3, "strategy": "optim_grads"},
    "no_shard, no_sync": {"backwards": 3, "strategy": "no_shard"},
}
REPLICATED = {
    "hybrid": {"replicas": 2},
    "hybrid, three backwards": {"replicas": 2, "backwards": 3},
}
WRONG = {
    "optim, no_sync under the default synchronisation": {"backwards": 3, "strategy": "optim", "auto_sync": True},
    "no_shard, no_sync under the default synchronisation": {"backwards": 3, "strategy": "no_shard", "auto_sync": True},
    "optim, no backward marked": {"strategy": "optim", "no_sync": False},
}
WRONG_REPLICATED = {
    "hybrid, no_sync under the default synchronisation": {"replicas": 2, "backwards": 3, "auto_sync": True},
    "hybrid, no backward marked": {"replicas": 2, "no_sync": False},
}
HALF = {
    "default": {},
    "buffer in fp32": {"main_grads": torch.float32},
    "calls in fp32": {"comm": torch.float32},
    "buffer in fp32, calls in bf16": {"main_grads": torch.float32, "comm": torch.bfloat16},
}


def redirected(name, cells):
    redirect_cuda()
    return [getattr(measure, name)("cpu", **cell) for cell in cells]


@functools.cache
def found(name, world_size, *named):
    """The cells of some dictionaries, in one start of the ranks."""
    cells = {key: cell for each in named for key, cell in globals()[each].items()}
    outcome = run_ranks(redirected, world_size, name, list(cells.values()), timeout_s=120.0, group_timeout_s=30.0)[0]
    return dict(zip(cells, outcome.value, strict=True))


def all_of(key):
    if key in {*DATA_PARALLEL, *WRONG}:
        return found("data_parallel", 2, "DATA_PARALLEL", "WRONG")[key]
    return found("data_parallel", 4, "REPLICATED", "WRONG_REPLICATED")[key]


@pytest.mark.parametrize("key", [*DATA_PARALLEL, *REPLICATED])
def test_sums_over_data_ranks_equal_one_process(key):
    result = all_of(key)
    assert result.worst < EXACT and result.norm < EXACT and result.parameters < EXACT, result
    assert result.dtypes == {"torch.float32"}


def test_shards_are_reduced_in_every_backward_and_no_sync_changes_nothing():
    assert all_of("one backward").reductions == 3
    for key in ("three backwards", "three backwards, default synchronisation", "optim_grads, no_sync", "hybrid, three backwards"):
        assert all_of(key).reductions == 9, key
    for key in ("optim, no_sync", "no_shard, no_sync"):
        assert all_of(key).reductions == 3, key


@pytest.mark.parametrize("key", [*WRONG, *WRONG_REPLICATED])
def test_sums_that_are_made_twice_or_not_at_all_go_unnoticed(key):
    result = all_of(key)
    assert result.worst > 0.5 and result.norm > 0.1 and result.parameters > 0.1, result


def test_without_a_mark_nothing_is_reduced():
    assert all_of("optim, no backward marked").reductions == 0


def test_gradients_of_a_half_precision_model_are_summed_in_half_precision_unless_the_buffer_is_fp32():
    cells = {key: {"backwards": 4, **cell} for key, cell in HALF.items()}
    outcome = run_ranks(redirected, 2, "half_precision", list(cells.values()), timeout_s=120.0, group_timeout_s=30.0)[0]
    results = dict(zip(cells, outcome.value, strict=True))
    assert {key: sorted(result.dtypes) for key, result in results.items()} == {
        "default": ["torch.bfloat16"],
        "buffer in fp32": ["torch.float32"],
        "calls in fp32": ["torch.float32"],
        "buffer in fp32, calls in bf16": ["torch.bfloat16"],
    }
    assert results["buffer in fp32"].worst < EXACT
    assert {key for key, result in results.items() if result.worst > 1e-3} == set(HALF) - {"buffer in fp32"}


def test_a_gradient_that_is_partial_on_tp_stays_one_term_of_its_sum():
    (result,) = run_ranks(redirected, 4, "tensor_parallel", [{}], timeout_s=120.0, group_timeout_s=30.0)[0].value
    partial = {name for name in result.gradients if "norm" in name}
    assert len(partial) == 4 and len(result.gradients) == 16
    for name, error in result.gradients.items():
        if name in partial:
            assert error > 0.3 and result.apart[name] > 0.3, (name, error)
        else:
            assert error < EXACT and result.apart[name] == 0.0, (name, error)


def test_a_row_cut_weight_fails_on_some_ranks_while_the_others_wait(ranks):
    outcomes = ranks(redirected, 4, "tensor_parallel", [{"rowwise": True}], check=False)
    for outcome in (outcomes[1], outcomes[3]):
        assert outcome.error == "AssertionError" and "DTensor chunk metadata is invalid" in outcome.message
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error != "AssertionError" and outcome.exitcode != 0


def test_plain_slices_of_tp_are_overwritten_with_those_of_the_first_rank(ranks):
    values = [outcome.value[0] for outcome in ranks(redirected, 4, "plain_slice", [{}])]
    assert values == [(1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (2.0, 1.0)]


def test_a_parameter_that_no_rank_used_gets_zeros_that_would_decay_it(ranks):
    zeros = [outcome.value[0] for outcome in ranks(redirected, 2, "skipped_block", [{}])]
    assert {name for each in zeros for name in each} == {f"blocks.1.{n}.{kind}" for n in (0, 1, 3) for kind in ("weight", "bias")}
    assert all(norm == 0.0 for each in zeros for norm in each.values())


def test_its_own_mean_needs_nccl(ranks):
    for outcome in ranks(redirected, 2, "data_parallel", [{"average": True}], check=False):
        assert "Cannot use ReduceOp.PREMUL_SUM with Gloo" in outcome.message


def as_it_is():
    measure.data_parallel("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_constructor_asks_for_one(ranks):
    for outcome in ranks(as_it_is, 2, check=False):
        assert "Megatron-FSDP" not in outcome.message
        assert 'self.device != torch.device(f"cuda:{torch.cuda.current_device()}")' in outcome.trace

"""What a session refuses: routes that do not fit, batches that cannot be cut, losses that are no sums; and how it cuts the others."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import mixle_core as mx
from mixle_core.testing import OwnsEverything, next_token_loss, token_batch, toy_model

Plan = mx.ParallelPlan
adamw = partial(torch.optim.AdamW, lr=1e-2)


def one_process(loss=next_token_loss, plan=None, **options):
    return mx.prepare(toy_model(), plan or Plan(), loss=loss, optimizer=adamw, plugins={}, **options)


@pytest.mark.parametrize(
    ("routes", "error", "text"),
    [
        ({"**.weight": adamw}, mx.OwnershipError, r"exactly one optimizer; none for 9 of 22\n  blocks\.\*\.branch\.bias \(2 of them\)"),
        ({"**": adamw, "embed.*": adamw}, mx.OwnershipError, r"several for 1 of 22: embed\.weight: claimed by \*\* and embed\.\*"),
        ({"**": adamw, "lora.*": adamw}, mx.UsageError, r"optimizer pattern 'lora\.\*' routes no trainable parameter"),
        (
            torch.optim.AdamW([torch.zeros(1)]),
            mx.UsageError,
            r"optimizer '\*\*' is a AdamW; expected what makes one from parameters, such as partial\(torch\.optim\.AdamW",
        ),
        (lambda parameters: None, mx.UsageError, r"optimizer '\*\*': the factory returned NoneType, expected a torch\.optim\.Optimizer"),
    ],
)
def test_routes_that_do_not_fit_are_refused_and_leave_the_model_free(routes, error, text):
    model = toy_model()
    with pytest.raises(error, match=text):
        mx.prepare(model, Plan(), loss=next_token_loss, optimizer=routes, plugins={"double": OwnsEverything()})
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.ones(1, 4), "batch has 1 rows for microbatches=2; pass at least one row for each microbatch"),
        ({"a": torch.ones(2), "b": [torch.ones(3, 1)]}, r"batch: tensors with \[2, 3\] rows on dim 0; expected one number of rows"),
        ({"a": torch.tensor(1.0)}, "batch: tensors with no rows on dim 0"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, text):
    with pytest.raises(mx.UsageError, match=text):
        one_process(plan=Plan(microbatches=2)).train_batch(batch)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda module, ids: (module(ids).sum(-1), 4), r"loss returned a tensor of shape \[2, 8\]: expected a summed scalar"),
        (
            lambda module, ids: (module(ids).sum().detach(), 4),
            r"loss returned a tensor of shape \[\]: expected a summed scalar with a gradient",
        ),
        (lambda module, ids: module(ids).sum(), r"^loss returned a Tensor; expected \(summed loss, number of loss tokens\)$"),
        (lambda module, ids: (module(ids).sum(), 2.5), r"^loss returned 2\.5 as the number of loss tokens; expected a whole number"),
        (lambda module, ids: (module(ids).sum(), -1), r"^loss returned -1 as the number of loss tokens"),
        (lambda module, ids: (module(ids).sum(), torch.tensor(2.0)), r"^loss returned tensor\(2\.\) as the number of loss tokens"),
        (lambda module, ids: (module(ids).sum(), None), r"^loss returned None as the number of loss tokens"),
        (lambda module, ids: (4, module(ids).sum()), r"^loss returned a tuple; expected \(summed loss, number of loss tokens\)$"),
    ],
)
def test_a_loss_that_is_no_summed_scalar_is_refused(loss, text):
    with pytest.raises(mx.UsageError, match=text):
        one_process(loss=loss).train_batch(token_batch(0, 0, 0))


def test_limits_that_cannot_be_are_refused_before_anything_happens():
    with pytest.raises(mx.UsageError, match="max_grad_norm=0: expected a number above 0, or None"):
        one_process(max_grad_norm=0)
    with pytest.raises(mx.PlanError, match="precision='fp8': expected one of fp32, bf16"):
        one_process(precision="fp8")


def test_plugins_passed_without_a_name_are_refused():
    with pytest.raises(mx.UsageError, match=r'^plugins names a OwnsEverything; expected names, or name -> module such as \{"mine": <'):
        mx.explain(toy_model(), Plan(), plugins=[OwnsEverything()])


@pytest.mark.parametrize("number", [-1, 3])
def test_more_examples_than_rows_are_refused(number):
    with pytest.raises(mx.UsageError, match=f"^num_examples={number}: expected 0 to 2, the rows of the batch$"):
        one_process().train_batch(token_batch(0, 0, 0, rows=2), num_examples=number)


def test_a_count_may_be_a_tensor_of_one_integer():
    def loss(module, ids):
        value, count = next_token_loss(module, ids)
        return value, torch.tensor(count)

    plain = one_process().train_batch(token_batch(0, 0, 0))
    assert one_process(loss=loss).train_batch(token_batch(0, 0, 0)) == plain


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_of_the_norm_that_cannot_be_is_refused_by_finish_too(limit):
    reduction = mx.attach(toy_model(), Plan(), plugins={})
    value, count = next_token_loss(reduction.module, token_batch(0, 0, 0))
    value.backward()
    with pytest.raises(mx.UsageError, match=r"^max_norm=.*: expected a number above 0, or None$"):
        reduction.finish(count, max_norm=limit)


def test_clipping_in_finish_is_clipping_behind_it():
    found = []
    for options in ({"max_norm": 0.01}, {}):
        reduction = mx.attach(toy_model(), Plan(), plugins={})
        value, count = next_token_loss(reduction.module, token_batch(0, 0, 0))
        value.backward()
        reduced = reduction.finish(count, **options)
        reduced.clip_(0.01)
        found.append((reduced.norm(), reduced.clip_factor, reduced.gradients))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-6)
    assert found[0][1] < 1
    for name, gradient in found[0][2].items():
        assert torch.allclose(gradient, found[1][2][name], rtol=1e-5, atol=0)


def test_a_session_drops_what_one_before_it_left():
    reduction = mx.attach(toy_model(), Plan(gradient_accumulation_steps=2), plugins={})
    options = {"loss": next_token_loss, "optimizer": adamw, "schedule": None, "max_grad_norm": None}
    mx.Session(reduction, **options).train_batch(token_batch(0, 0, 0))
    session = mx.Session(reduction, **options)
    session.train_batch(token_batch(1, 0, 0))
    receipt = session.train_batch(token_batch(2, 0, 0))
    fresh = mx.prepare(toy_model(), Plan(gradient_accumulation_steps=2), loss=next_token_loss, optimizer=adamw, plugins={})
    fresh.train_batch(token_batch(1, 0, 0))
    assert receipt.grad_norm == pytest.approx(fresh.train_batch(token_batch(2, 0, 0)).grad_norm, rel=1e-6)


class Pair(NamedTuple):
    ids: torch.Tensor
    extra: Any


def test_rows_are_cut_as_evenly_as_possible_in_every_container():
    pieces = []

    def loss(module, batch):
        pieces.append(batch)
        return next_token_loss(module, batch["two"].ids)

    session = one_process(loss=loss, plan=Plan(microbatches=2))
    ids = token_batch(0, 0, 0, rows=5)
    receipt = session.train_batch({"two": Pair(ids, [torch.arange(5)]), "factor": torch.tensor(2.0), "name": "x"})
    assert [len(piece["two"].ids) for piece in pieces] == [3, 2] and receipt.num_local_examples == 5
    assert torch.equal(torch.cat([piece["two"].ids for piece in pieces]), ids)
    assert pieces[1]["two"].extra[0].tolist() == [3, 4] and pieces[1]["factor"] == 2.0 and pieces[1]["name"] == "x"

"""Embeddings and heads cut along the vocabulary: tied weights, a loss in chunks, the padding row, ids of other ranks."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mixle_core import Boundary, ModelLayout, ModuleLayout, ParallelPlan, Replica, Shard, Term, attach, explain, hookimpl, load_plugins
from mixle_core.audit import reference_model, relative_error, verify
from mixle_core.testing import run_ranks

WHOLE, PARTIAL = Replica("complete"), Replica("partial")
SUM = Boundary(outside=WHOLE, inside=Term())
PLAN = ParallelPlan(tp=2)
ENV = {"MIXLE_PLUGINS": "dtensor-tp"}


class Words(nn.Module):
    """Embedding, one layer, head."""

    def __init__(self, *, tied=False, **options):
        super().__init__()
        self.embed = nn.Embedding(16, 8, **options)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, by_keyword=False):
        found = self.embed(input=ids) if by_keyword else self.embed(ids)
        return self.head(self.body(found))


class WordsLayout:
    """A layout plugin for Words; `summed=False` forgets that other ranks hold the other rows."""

    def __init__(self, summed=True):
        self.summed = summed

    @hookimpl
    def declare_layout(self, model, plan):
        head = Boundary(outside=WHOLE, inside=Shard(-1))
        modules = {
            "embed": ModuleLayout(parameters={"weight": Shard(0)}, lookup="weight", output=SUM if self.summed else None),
            "body": ModuleLayout(parameters={"{weight,bias}": WHOLE}),
            "head": ModuleLayout(parameters={"weight": Shard(0)}, inputs={0: Boundary(outside=WHOLE, inside=PARTIAL)}, output=head),
        }
        return ModelLayout(axis="tp", modules=modules)


def words(**options):
    with torch.device("meta"):
        return Words(**options)


def attached(**options):
    return attach(words(**options), PLAN, plugins={"words": WordsLayout()}, seed=5)


def twelve_ids(update, backward, data_rank):
    generator = torch.Generator().manual_seed(update)
    return torch.randint(16, (12,), generator=generator), torch.randint(16, (12,), generator=generator)


def cross_entropy(module, batch):
    ids, targets = batch
    return F.cross_entropy(module(ids), targets, reduction="sum"), len(ids)


def verify_tied_on_rank():
    optimizer = functools.partial(torch.optim.AdamW, lr=0.1)
    build = functools.partial(words, tied=True)
    return verify(build, PLAN, loss=cross_entropy, batch=twelve_ids, windows=[1], plugins={"words": WordsLayout()}, optimizer=optimizer)


def test_tied_embedding_and_head_stay_one_parameter_through_a_step_of_adamw():
    for outcome in run_ranks(verify_tied_on_rank, 2, env=ENV, timeout_s=60):
        assert outcome.value.passed(1e-5), outcome.value


def tied_objects_on_rank():
    reduction = attached(tied=True)
    return reduction.model.embed.weight is reduction.model.head.weight, [name for name, _ in reduction.named_parameters()]


def test_tied_weights_are_one_object_on_a_rank_and_one_row_of_the_table():
    for outcome in run_ranks(tied_objects_on_rank, 2, env=ENV, timeout_s=60):
        assert outcome.value == (True, ["body.bias", "body.weight", "embed.weight"])
    table = explain(words(tied=True), PLAN, plugins=load_plugins(["dtensor-tp"], extra={"words": WordsLayout()}))
    assert [row.name for row in table.rows] == ["body.bias", "body.weight", "embed.weight"]
    assert table["head.weight"] is table["embed.weight"] and table["embed.weight"].aliases == ("head.weight",)


def chunked_loss_on_rank():
    """The hidden gradient, collected from the loss of two chunks, against one process; then that of the layer below."""
    reduction, reference = attached(), reference_model(words, 5)
    ids, targets = (values[:8] for values in twelve_ids(0, 0, 0))
    found = []
    for model in (reduction.model, reference):
        hidden = model.body(model.embed(ids))
        leaf = hidden.detach().requires_grad_()
        for piece, wanted in zip(leaf.split(4), targets.split(4), strict=True):
            F.cross_entropy(model.head(piece), wanted, reduction="sum").backward()
        hidden.backward(leaf.grad)
        found.append(leaf.grad)
    gradient = reduction.finish(8).gradients["body.weight"]
    return relative_error(found[0], found[1]), relative_error(gradient, reference.body.weight.grad / 8), found[0].tolist()


def test_the_hidden_gradient_of_a_loss_in_two_chunks_is_whole_on_every_rank():
    outcomes = run_ranks(chunked_loss_on_rank, 2, env=ENV, timeout_s=60)
    assert all(outcome.value[0] <= 1e-6 and outcome.value[1] <= 1e-6 for outcome in outcomes), outcomes
    assert outcomes[0].value[2] == outcomes[1].value[2]


def padding_on_rank(padding, by_keyword):
    """Error of this rank's embedding gradient, the norms of its rows, and what the ids of other ranks look up here."""
    reduction = attached(padding_idx=padding)
    reference = reference_model(lambda: words(padding_idx=padding), 5)
    ids, targets = torch.arange(16), twelve_ids(0, 0, 0)[0].repeat(2)[:16]
    for module in (reduction.module, reference):
        F.cross_entropy(module(ids, by_keyword), targets, reduction="sum").backward()
    mine = slice(8 * reduction.mesh.rank, 8 * reduction.mesh.rank + 8)
    gradient = reduction.finish(16).gradients["embed.weight"]
    local = reduction.model.embed.forward(ids).detach()
    zeros = [i for i in range(16) if not local[i].any()]
    return relative_error(gradient, reference.embed.weight.grad[mine] / 16), gradient.norm(dim=1).tolist(), zeros


@pytest.mark.parametrize(("padding", "by_keyword"), [(0, False), (3, True), (8, False), (12, True)])
def test_the_padding_row_has_no_gradient_on_whichever_rank_it_lies(padding, by_keyword):
    outcomes = run_ranks(padding_on_rank, 2, padding, by_keyword, env=ENV, timeout_s=60)
    assert all(outcome.value[0] <= 1e-6 for outcome in outcomes), outcomes
    norms = [norm for outcome in outcomes for norm in outcome.value[1]]
    assert [row for row, norm in enumerate(norms) if norm == 0.0] == [padding]
    others = [set(range(8, 16)), set(range(8))]
    assert [set(outcome.value[2]) for outcome in outcomes] == [other | {padding} for other in others]


def call_on_rank(ids):
    attached().module(torch.tensor(ids))


@pytest.mark.parametrize("stray", [16, -1])
def test_an_id_outside_the_vocabulary_fails_on_every_rank_as_in_one_process(stray):
    outcomes = run_ranks(call_on_rank, 2, [1, 9, stray], env=ENV, timeout_s=30, check=False)
    assert [outcome.error for outcome in outcomes] == ["IndexError", "IndexError"]


def attach_on_rank(options, summed):
    attach(words(**options), PLAN, plugins={"words": WordsLayout(summed)})


@pytest.mark.parametrize(("options", "option"), [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq")])
def test_embedding_options_that_need_rows_of_other_ranks_are_refused(options, option):
    outcomes = run_ranks(attach_on_rank, 2, options, True, env=ENV, timeout_s=30, check=False)
    assert [outcome.error for outcome in outcomes] == ["CapabilityError"] * 2
    assert all(outcome.message.startswith(f"embed: {option} ") for outcome in outcomes), outcomes


def test_a_lookup_whose_output_is_not_summed_is_refused():
    outcomes = run_ranks(attach_on_rank, 2, {}, False, env=ENV, timeout_s=30, check=False)
    assert [outcome.error for outcome in outcomes] == ["LayoutError"] * 2
    assert all(outcome.message.startswith("embed: lookup='weight' ") for outcome in outcomes), outcomes

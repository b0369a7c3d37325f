"""DistributedDataParallel as an owner equals one fp32 process: gradients, norms, parameters after the updates, copies to the bit."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
from torch import nn

from mixle_core import ParallelPlan, attach
from mixle_core.audit import relative_error, verify
from mixle_core.testing import next_token_loss, run_ranks, tied_toy_model, token_batch, toy_model

DDP2 = ParallelPlan(dp_replicate=2)


class Attention(nn.Module):
    """torch's attention reads the weight of its output projection without calling the module that holds it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)])
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Shared(nn.Module):
    """One block in two places, an activation in two places, a scalar parameter, one of fp64."""

    def __init__(self):
        super().__init__()
        block, act = nn.Linear(16, 16), nn.Tanh()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([block, act, block, act])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(16, 32, dtype=torch.float64)

    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head((hidden * self.scale).double())


def seeded(kind):
    torch.manual_seed(0)
    return kind()


def frozen():
    model = toy_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "norm" not in name)
    return model


MODELS = {
    "toy": toy_model,
    "tied": tied_toy_model,
    "frozen": frozen,
    "attention": functools.partial(seeded, Attention),
    "shared": functools.partial(seeded, Shared),
}


def uneven(update, backward, data_rank):
    """The first rank has no loss token at all, the others lose some."""
    ids = token_batch(update, backward, data_rank)
    ids[:, (0 if data_rank == 0 else 5) :] = 0
    return ids


BATCHES = {"even": token_batch, "uneven": uneven}


@attrs.frozen
class Cell:
    """One composition to compare with one process."""

    plan: ParallelPlan
    model: str = "toy"
    batch: str = "even"
    windows: list[int] | None = None
    clip: float | None = 0.05
    tolerance: float = 1e-5


TWO, FOUR = (attrs.evolve(DDP2, gradient_accumulation_steps=steps) for steps in (2, 4))
CELLS = {
    "one backward, clipped": Cell(DDP2),
    "one backward": Cell(DDP2, clip=None),
    "four backwards and a window of two, clipped": Cell(FOUR, windows=[4, 2, 4]),
    "four backwards and a window of two": Cell(FOUR, windows=[4, 2, 4], clip=None),
    "four ranks": Cell(ParallelPlan(dp_replicate=4, gradient_accumulation_steps=2), windows=[2, 1, 2]),
    "tied weights": Cell(TWO, "tied"),
    "frozen parameters": Cell(TWO, "frozen"),
    "attention that does not call its output projection": Cell(TWO, "attention"),
    "shared blocks, a scalar, two dtypes": Cell(TWO, "shared"),
    "activation checkpointing": Cell(attrs.evolve(TWO, activation_checkpointing=True)),
    "a rank without loss tokens": Cell(TWO, batch="uneven"),
    "bf16": Cell(attrs.evolve(TWO, precision="bf16"), tolerance=5e-2),
    "eight microbatches on one rank": Cell(ParallelPlan(gradient_accumulation_steps=4, microbatches=2)),
}


def verified(names):
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    return {
        name: verify(
            MODELS[cell.model],
            cell.plan,
            loss=next_token_loss,
            batch=BATCHES[cell.batch],
            windows=cell.windows,
            max_grad_norm=cell.clip,
            optimizer=sgd,
        )
        for name, cell in ((name, CELLS[name]) for name in names)
    }


@functools.cache
def reports(world_size):
    """All cells of a world size in one start of its ranks."""
    names = [name for name, cell in CELLS.items() if cell.plan.world_size == world_size]
    return run_ranks(verified, world_size, names, env={"MIXLE_PLUGINS": "torch-ddp"}, timeout_s=90.0)[0].value


@pytest.mark.parametrize("name", list(CELLS))
def test_equals_one_process(name):
    cell = CELLS[name]
    report = reports(cell.plan.world_size)[name]
    assert report.passed(cell.tolerance), report
    assert len(report.updates) == 3 and all(update.skipped is None for update in report.updates)
    assert set(report.collectives) == {"torch-ddp" if cell.plan.world_size > 1 else "local"}


def test_a_rank_without_any_loss_token_takes_the_same_steps():
    report = reports(2)["a rank without loss tokens"]
    assert [update.num_tokens for update in report.updates] == [2 * 2 * 4] * 3


def test_a_short_window_is_the_mean_of_what_it_has():
    report = reports(2)["four backwards and a window of two"]
    assert [update.num_tokens for update in report.updates] == [4 * 2 * 2 * 7, 2 * 2 * 2 * 7, 4 * 2 * 2 * 7]


def test_no_token_on_any_rank_is_no_step(ranks):
    for outcome in ranks(without_tokens, 2):
        assert outcome.value == ("no loss token on any rank", True)


def without_tokens():
    reduction = attach(toy_model(), DDP2)
    optimizer = torch.optim.SGD([p for _, p in reduction.named_parameters()], lr=1.0)
    loss, tokens = next_token_loss(reduction.module, torch.zeros(2, 8, dtype=torch.long))
    loss.backward()
    reduced = reduction.finish(tokens)
    if reduced.skipped is None:
        optimizer.step()
    return reduced.skipped, all(bool(torch.isfinite(p).all()) for _, p in reduction.named_parameters())


def nonfinite(value):
    reduction = attach(toy_model(), DDP2)
    optimizer = torch.optim.AdamW([p for _, p in reduction.named_parameters()], lr=0.1)
    before = {name: p.detach().clone() for name, p in reduction.named_parameters()}
    loss, tokens = next_token_loss(reduction.module, token_batch(0, 0, 0))
    (loss * (value if reduction.mesh.rank == 1 else 1.0)).backward()
    reduced = reduction.finish(tokens)
    reduced.clip_(1.0)
    if reduced.skipped is None:
        optimizer.step()
    return reduced.skipped, all(torch.equal(before[name], p) for name, p in reduction.named_parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_is_no_step_on_any(ranks, value):
    first, second = (outcome.value for outcome in ranks(nonfinite, 2, value))
    assert first == second
    assert first[0].startswith("non-finite gradient: blocks.0")
    assert first[1]


def attached_twice():
    model = seeded(Attention)
    for _ in range(2):
        reduction = attach(model, DDP2)
        for update in range(2):
            reference = seeded(Attention)
            loss, tokens = next_token_loss(reduction.module, token_batch(update, 0, reduction.mesh.rank))
            loss.backward()
            reduced = reduction.finish(tokens)
            for rank in range(2):
                (next_token_loss(reference, token_batch(update, 0, rank))[0] / reduced.num_tokens).backward()
            wanted = {name: p.grad for name, p in reference.named_parameters()}
            errors = {name: relative_error(gradient, wanted[name]) for name, gradient in reduced.gradients.items()}
            assert max(errors.values()) < 1e-5, errors
            reduction.zero()
        reduction.close()
    loss, _ = next_token_loss(model, token_batch(0, 0, 0))
    loss.backward()
    return True


def test_a_closed_model_runs_by_itself_and_can_be_attached_again(ranks):
    assert all(outcome.value for outcome in ranks(attached_twice, 2))

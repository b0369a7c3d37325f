"""fully_shard as an owner equals one fp32 process: gradients, norms, parameters after the updates, copies to the bit."""

from __future__ import annotations

import functools

import attrs
import pytest
import torch
from torch import nn

from mixle_core import ParallelPlan
from mixle_core.audit import verify
from mixle_core.testing import next_token_loss, run_ranks, tied_toy_model, token_batch, toy_model

FSDP2 = ParallelPlan(dp_shard=2)
HSDP = ParallelPlan(dp_replicate=2, dp_shard=2)


class Blocks(nn.Module):
    """Tokens, some blocks, logits; `order` says which blocks run and when."""

    def __init__(self, blocks, *, vocab=32, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids, order=None):
        hidden = self.embed(ids)
        for number in range(len(self.blocks)) if order is None else order:
            hidden = self.blocks[number](hidden)
        return self.head(hidden)


class Looped(Blocks):
    """Every block runs three times in one forward."""

    def forward(self, ids, order=None):
        return super().forward(ids, 3 * list(range(len(self.blocks))))


def seeded(build):
    torch.manual_seed(0)
    return build()


def attention():
    """torch's attention reads the weight of its output projection without calling the module that holds it."""
    return Blocks([nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)])


def uneven_rows():
    """Neither 33 nor 5 rows divide over two or four ranks; of 5 and 2, one of four ranks gets nothing."""
    return Blocks([nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 5))], vocab=33, hidden=5)


def shared_activation():
    act = nn.Tanh()
    return Blocks([nn.Linear(16, 16), act, nn.Linear(16, 16), act])


def looped():
    return Looped([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)])


def mixed_dtypes():
    """fp64 in one unit, fp32 in the others: each unit reduces in its own."""
    return Blocks([nn.Linear(16, 16), AsDouble()])


class AsDouble(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, values):
        return self.inner(values.double()).float()


def frozen():
    model = toy_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "norm" not in name and "blocks.1" not in name)
    return model


MODELS = {
    "toy": toy_model,
    "tied": tied_toy_model,
    "frozen": frozen,
    **{build.__name__: functools.partial(seeded, build) for build in (attention, uneven_rows, shared_activation, looped, mixed_dtypes)},
}


def no_tokens_on_one_rank(update, backward, data_rank):
    ids = token_batch(update, backward, data_rank)
    ids[:, (0 if data_rank == 0 else 5) :] = 0
    return ids


def of_33_words(update, backward, data_rank):
    return token_batch(update, backward, data_rank, vocab=33)


BATCHES = {"even": token_batch, "no-tokens-on-one-rank": no_tokens_on_one_rank, "33-words": of_33_words}


@attrs.frozen
class Cell:
    """One composition to compare with one process."""

    plan: ParallelPlan
    model: str = "toy"
    batch: str = "even"
    windows: list[int] | None = None
    clip: float | None = 0.05
    tolerance: float = 1e-5


def plan_cells(name, plan):
    """What every plan has to be exact in."""
    two, four = (attrs.evolve(plan, gradient_accumulation_steps=steps) for steps in (2, 4))
    return {
        f"{name}: one backward, clipped": Cell(plan),
        f"{name}: four backwards and a window of two, clipped": Cell(four, windows=[4, 2, 4]),
        f"{name}: rows that do not divide": Cell(two, "uneven_rows", "33-words", windows=[2, 1, 2]),
        f"{name}: tied weights": Cell(two, "tied"),
        f"{name}: frozen parameters and a frozen unit": Cell(two, "frozen"),
        f"{name}: activation checkpointing": Cell(attrs.evolve(two, activation_checkpointing=True)),
        f"{name}: a rank without loss tokens": Cell(plan, batch="no-tokens-on-one-rank"),
        f"{name}: bf16": Cell(attrs.evolve(two, precision="bf16"), tolerance=5e-2),
    }


TWO = attrs.evolve(FSDP2, gradient_accumulation_steps=2)
CELLS = {
    "fsdp2: one backward": Cell(FSDP2, clip=None),
    "fsdp2: four backwards and a window of two": Cell(attrs.evolve(FSDP2, gradient_accumulation_steps=4), windows=[4, 2, 4], clip=None),
    **plan_cells("fsdp2", FSDP2),
    **plan_cells("hsdp2x2", HSDP),
    "fsdp4: rows that do not divide, and a rank without any": Cell(ParallelPlan(dp_shard=4), "uneven_rows", "33-words"),
    "fsdp2: attention that does not call its output projection": Cell(TWO, "attention"),
    "fsdp2: an activation in two places": Cell(TWO, "shared_activation"),
    "fsdp2: units of different dtypes": Cell(TWO, "mixed_dtypes"),
    "fsdp2: units that one forward calls three times, one backward": Cell(FSDP2, "looped"),
    "fsdp2: units that one forward calls three times, two backwards": Cell(TWO, "looped"),
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
    return run_ranks(verified, world_size, names, env={"MIXLE_PLUGINS": "torch-fsdp2"}, timeout_s=90.0)[0].value


@pytest.mark.parametrize("name", list(CELLS))
def test_equals_one_process(name):
    cell = CELLS[name]
    report = reports(cell.plan.world_size)[name]
    assert report.passed(cell.tolerance), report
    assert len(report.updates) == 3 and all(update.skipped is None for update in report.updates)
    assert report.collectives["torch-fsdp2"] > 0


@pytest.mark.parametrize("name", list(CELLS))
def test_every_rank_counts_the_tokens_of_all(name):
    cell = CELLS[name]
    backwards = cell.windows or [cell.plan.num_backwards] * 3
    ranks_with_tokens, tokens = (cell.plan.data_size, 7) if cell.batch != "no-tokens-on-one-rank" else (cell.plan.data_size - 1, 4)
    found = [update.num_tokens for update in reports(cell.plan.world_size)[name].updates]
    assert found == [number * ranks_with_tokens * 2 * tokens for number in backwards]

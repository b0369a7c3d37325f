"""A fit that saves and one that resumes are one run, on this plan and on the command line; what cannot be is said before training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mixle_lm import LM, cosine_schedule
from torch import nn

import mixle_core as mx

IDS = np.random.default_rng(0).integers(1, 31, 700)


class Model(nn.Module):
    """An embedding, a hidden layer with dropout, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.drop, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.hidden(self.embed(ids)).tanh()))


def fitted(**options):
    lm = LM(Model(), seed=1)
    result = lm.fit(
        IDS,
        sequence_length=16,
        batch_size=4,
        gradient_accumulation_steps=2,
        schedule=cosine_schedule(9),
        progress=False,
        **{"steps": 9, **options},
    )
    losses = [receipt.loss for receipt in result.receipts]
    values = [parameter.detach().clone() for parameter in lm.model.parameters()]
    at = lm.loader.state_dict()
    lm.close()
    return losses, values, at, result


def names(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


@pytest.mark.parametrize("resume", ["auto", "run", "step"])
def test_a_run_in_two_parts_is_the_run_in_one_to_the_bit_also_inside_an_epoch(tmp_path, resume):
    losses, values, at, _ = fitted()
    run = tmp_path / "run"
    first, _, _, result = fitted(steps=4, save_to=run)
    assert result.checkpoint == run / "step-00000004" and result.resumed is None
    place = {"auto": "auto", "run": run, "step": run / "step-00000004"}[resume]
    second, again, end, result = fitted(save_to=run, resume=place)
    assert (first + second, end, result.resumed) == (losses, at, 4)
    assert all(torch.equal(a, b) for a, b in zip(values, again, strict=True))
    assert names(run) == ["step-00000004", "step-00000009"]


def test_steps_are_saved_beside_the_training_and_old_ones_go(tmp_path):
    _, _, _, result = fitted(save_to=tmp_path, save_every=2, keep=3)
    assert names(tmp_path) == ["step-00000006", "step-00000008", "step-00000009"]
    assert result.checkpoint == tmp_path / "step-00000009"


def test_auto_begins_anew_where_there_is_nothing_and_ends_at_once_where_all_is_done(tmp_path):
    losses, _, _, result = fitted(save_to=tmp_path / "run", resume="auto")
    assert len(losses) == 9 and result.resumed is None
    nothing, _, _, result = fitted(save_to=tmp_path / "run", resume="auto")
    assert nothing == [] and result.resumed == 9 and result.checkpoint == tmp_path / "run" / "step-00000009"


def test_epochs_count_from_the_start_of_the_run(tmp_path):
    losses, *_ = fitted(steps=None, epochs=2)
    first, *_ = fitted(steps=3, save_to=tmp_path)
    second, *_ = fitted(steps=None, epochs=2, save_to=tmp_path, resume="auto")
    assert first + second == losses


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"save_every": 2}, "save_every=2 without a directory; give save_to, where the steps go"),
        ({"keep": 2}, "keep=2 without a directory"),
        ({"resume": "auto"}, 'resume="auto" without a directory; give save_to'),
        ({"save_every": 0, "save_to": "x"}, "save_every=0"),
        ({"resume": "nowhere"}, "nowhere: no such directory; expected one with steps, or a step"),
    ],
)
def test_what_cannot_be_saved_or_resumed_is_said_before_training(options, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mx.MixleError) as error:
        fitted(**options)
    assert text in str(error.value)


def test_a_directory_with_later_steps_is_not_written_into(tmp_path):
    fitted(steps=4, save_to=tmp_path)
    with pytest.raises(
        mx.UsageError, match=r"has a step 4 already, and this fit begins after update 0; go on from it with resume=\"auto\""
    ):
        fitted(save_to=tmp_path)


def test_rows_of_another_run_are_refused(tmp_path):
    fitted(steps=4, save_to=tmp_path)
    with pytest.raises(mx.MixleError, match=r"loader state: seed is 1, here it is 2"):
        LM(Model(), seed=2).fit(
            IDS,
            sequence_length=16,
            batch_size=4,
            gradient_accumulation_steps=2,
            save_to=tmp_path,
            resume="auto",
            schedule=cosine_schedule(9),
            progress=False,
        )

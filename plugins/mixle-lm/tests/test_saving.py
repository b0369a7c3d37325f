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


def test_a_damaged_newest_step_is_passed_over_and_the_run_goes_on_to_its_end(tmp_path):
    losses, *_ = fitted()
    fitted(steps=6, save_to=tmp_path, save_every=3)
    (tmp_path / "step-00000006" / "_SUCCESS").write_bytes(b"{}")
    again, _, _, result = fitted(save_to=tmp_path, save_every=3, resume="auto")
    assert result.resumed == 3 and again == losses[3:]
    assert [name for name in names(tmp_path) if ".damaged-" not in name] == ["step-00000003", "step-00000006", "step-00000009"]


def two_fits(folder, **options):
    """A fit without checkpoints, and one with; the losses of the second."""
    lm = LM(Model(), seed=1)
    common = {"sequence_length": 16, "batch_size": 4, "progress": False, "lr": 1e-3}
    lm.fit(IDS, steps=3, **common)
    result = lm.fit(IDS, save_to=folder, **{"steps": 5, **options}, **common)
    lm.close()
    return [receipt.loss for receipt in result.receipts], result


def test_steps_of_a_resumed_fit_do_not_count_those_of_a_fit_before_it(tmp_path):
    whole, _ = two_fits(tmp_path / "whole")
    first, _ = two_fits(tmp_path / "run", steps=2)
    second, result = two_fits(tmp_path / "run", resume="auto")
    assert first + second == whole and result.resumed == 2


def test_a_directory_that_is_a_link_is_the_same_directory(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    fitted(save_to=tmp_path / "run")
    nothing, _, _, result = fitted(save_to=tmp_path / "run", resume=tmp_path / "link")
    assert nothing == [] and result.checkpoint.name == "step-00000009"


def test_after_a_resume_that_failed_halfway_the_model_neither_evaluates_nor_trains(tmp_path):
    fitted(steps=4, save_to=tmp_path)
    (data,) = (tmp_path / "step-00000004").glob("data-*")
    raw = bytearray(data.read_bytes())
    raw[-20] ^= 1
    data.write_bytes(raw)
    lm = LM(Model(), seed=1)
    options = {"sequence_length": 16, "batch_size": 4, "gradient_accumulation_steps": 2, "schedule": cosine_schedule(9), "progress": False}
    with pytest.raises(mx.MixleError, match="as they were written"):
        lm.fit(IDS, steps=9, save_to=tmp_path, resume="auto", **options)
    for call in (lambda: lm.evaluate(IDS, sequence_length=16), lambda: lm.fit(IDS, steps=1, **options)):
        with pytest.raises(mx.UsageError, match="a load failed halfway, so parameters and optimizer are undefined"):
            call()

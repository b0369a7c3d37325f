"""`LM` on several ranks against one process that trains on the same rows: losses, norms, parameters, receipts, text."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mixle_lm import LM

import mixle_core as mx
from mixle_core.audit import assemble, relative_error
from mixle_core.testing import run_ranks

adamw = partial(torch.optim.AdamW, lr=3e-4, eps=1e-6)  # as `verify`: see docs/ownership.md
PLANS = {
    "ddp2": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "ddp2xtp2": {"dp_replicate": 2, "tp": 2},
    "fsdp2xtp2-sp": {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
}
LENGTH, ROWS = 16, 4
"""Rows of one process in a batch; the data ranks share them."""


def ids():
    """Documents that end with 0; 21 rows, which no number of ranks here divides."""
    generator = np.random.default_rng(4)
    stream = generator.integers(1, 256, 20 * LENGTH + 6)
    stream[generator.choice(len(stream), 12, replace=False)] = 0
    return stream


def fitted(plan, options):
    sizes = mx.ParallelPlan(**plan)
    lm = LM("qwen3:tiny", seed=5)
    result = lm.fit(
        ids(),
        sequence_length=LENGTH,
        eos_token_id=0,
        batch_size=ROWS // sizes.data_size,
        epochs=2,
        distributed=sizes.world_size > 1,
        optimizer=adamw,
        max_grad_norm=0.5,
        **plan,
        **options,
    )
    mine = {name: p.detach().cpu() for name, p in lm.session.reduction.named_parameters()}
    if dist.is_initialized():
        mine = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in mine.items()}
        everyone = lm.session.reduction.mesh.gather_objects(mine)
        mine = {name: assemble(sizes, result.table[name], [theirs[name] for theirs in everyone])[0] for name in mine}
    score = lm.evaluate(ids()[:50], sequence_length=LENGTH, batch_size=2)
    text = [lm.generate(ids()[1:8], max_new_tokens=5), lm.generate([7], max_new_tokens=5, temperature=1.0, seed=2)]
    facts = (result.documents_separate, [receipt.as_dict() for receipt in result.receipts], score, text, lm.loader.state_dict())
    return facts, mine


@pytest.fixture(scope="module")
def reference():
    options = {steps: {"gradient_accumulation_steps": steps, "microbatches": 1} for steps in (1, 4)}
    return {steps: run_ranks(fitted, 1, {}, passed, timeout_s=120, reuse=True)[0].value for steps, passed in options.items()}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("name", list(PLANS))
def test_a_distributed_fit_is_that_of_one_process_on_the_same_rows(reference, name, accumulation):
    """Two epochs of 21 rows in batches of 4: the last batch of an epoch has one row, and windows go on across the epochs."""
    plan = mx.ParallelPlan(**PLANS[name])
    options = {"gradient_accumulation_steps": accumulation, "microbatches": 1 if plan.data_size > 2 else 2}
    (wanted_apart, wanted, wanted_score, wanted_text, state), wanted_parameters = reference[accumulation]
    for outcome in run_ranks(fitted, plan.world_size, PLANS[name], options, timeout_s=120, reuse=True):
        (apart, receipts, score, text, where), parameters = outcome.value
        assert apart is wanted_apart is True
        assert where == state
        assert len(receipts) == len(wanted) == (12 if accumulation == 1 else 3)
        for mine, theirs in zip(receipts, wanted, strict=True):
            assert (mine["num_tokens"], mine["num_examples"]) == (theirs["num_tokens"], theirs["num_examples"])
            assert mine["accumulation"] == theirs["accumulation"]
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert score == pytest.approx(wanted_score, rel=1e-5)
        assert text == wanted_text
        errors = {name: relative_error(parameters[name], wanted_parameters[name]) for name in wanted_parameters}
        assert max(errors.values()) < 1e-5, max(errors, key=errors.get)


def test_local_numbers_of_the_receipts_add_up_to_the_global_ones():
    values = [o.value[0][1] for o in run_ranks(fitted, 4, PLANS["ddp2xtp2"], {"gradient_accumulation_steps": 4}, timeout_s=120, reuse=True)]
    for together in zip(*values, strict=True):
        assert sum(receipt["num_update_local_tokens"] for receipt in together) == 2 * together[0]["num_tokens"]
        assert sum(receipt["num_update_local_examples"] for receipt in together) == 2 * together[0]["num_examples"]
        assert {receipt["owners"][0]["owner"] for receipt in together} == {"torch-ddp"}
        assert all(receipt["owners"][0]["num_collectives"] >= 2 for receipt in together)


def last_position():
    lm = LM("qwen3:tiny", seed=5)
    rows = np.lib.stride_tricks.sliding_window_view(ids()[:40], LENGTH + 1)
    result = lm.fit(
        rows, dense=False, batch_size=4, epochs=1, distributed=dist.is_initialized(), dp_shard=dist.get_world_size(), optimizer=adamw
    )
    return [(r.num_tokens, r.num_examples, r.loss) for r in result.receipts]


def one_process_last_position():
    lm = LM("qwen3:tiny", seed=5)
    rows = np.lib.stride_tricks.sliding_window_view(ids()[:40], LENGTH + 1)
    return [(r.num_tokens, r.num_examples, r.loss) for r in lm.fit(rows, dense=False, batch_size=8, epochs=1, optimizer=adamw).receipts]


def test_one_target_a_row_under_data_parallelism_is_that_of_one_process():
    wanted = run_ranks(one_process_last_position, 1, timeout_s=60)[0].value
    assert [tokens for tokens, _, _ in wanted] == [8, 8, 8]
    for outcome in run_ranks(last_position, 2, timeout_s=60):
        assert outcome.value == [(tokens, examples, pytest.approx(loss, rel=1e-5)) for tokens, examples, loss in wanted]


def odd_rows():
    """tp ranks that read other data."""
    lm = LM("qwen3:tiny")
    stream = ids() if dist.get_rank() == 0 else ids()[::-1].copy()
    try:
        lm.fit(stream, sequence_length=LENGTH, steps=1, distributed=True, tp=2)
    except mx.MixleError as error:
        return str(error)
    return None


def test_tp_ranks_that_read_other_data_fail_before_the_first_forward():
    for outcome in run_ranks(odd_rows, 2, timeout_s=60):
        assert outcome.value.startswith("fit: fingerprint is ")
        assert outcome.value.endswith("; pass the same on every rank")


def unlike_data_ranks(change):
    """What rank 1 of two data ranks passes differs from rank 0."""
    options = {"sequence_length": LENGTH, "batch_size": 2, "steps": 1, "lr": 1e-3}
    stream = ids()
    if dist.get_rank() == 1:
        stream = stream[::-1].copy() if change == "data" else stream[:-20] if change == "less" else stream
        options.update({"batch_size": {"batch_size": 4}, "length": {"sequence_length": 8}, "lr": {"lr": 1e-2}}.get(change, {}))
    try:
        LM("qwen3:tiny").fit(stream, distributed=True, dp_replicate=2, **options)
    except mx.MixleError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("data", "fit: fingerprint is "),
        ("less", "fit: num_rows is "),
        ("batch_size", "fit: batch_size is 4 on rank 1 and 2 on rank 0; pass the same on every rank"),
        ("length", "fit: num_rows is "),
        ("lr", "session: optimizer ** is "),
    ],
)
def test_data_ranks_that_train_on_other_data_or_in_another_way_are_refused_on_every_rank(change, text):
    for outcome in run_ranks(unlike_data_ranks, 2, change, timeout_s=60):
        assert outcome.value is not None
        assert outcome.value.startswith(text)


SCRIPT = """
import mixle_core as mx
from mixle_lm import LM
try:
    LM("qwen3:tiny").fit(list(range(50)), sequence_length=8, distributed=True, distributed_backend="torch_native", dp_shard=2)
except mx.CapabilityError as error:
    print(error)
"""


COMMANDS = {
    "script": (["-W", "ignore", "train.py", "--steps", "3"], "train.py --steps 3"),
    "module": (["-u", "-m", "my.train", "a b"], "-m my.train 'a b'"),
    "package": (["-m", "my", "--x"], "-m my --x"),
    "command": (["-c", SCRIPT], "SCRIPT.py"),
}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """All commands at once: each is an interpreter that imports everything on one core."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "my").mkdir()
    for name in ("train.py", "my/__init__.py", "my/train.py", "my/__main__.py"):
        (folder / name).write_text("" if name.endswith("__init__.py") else SCRIPT)
    popen = partial(subprocess.Popen, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = {name: popen([sys.executable, *command]) for name, (command, _) in COMMANDS.items()}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", COMMANDS)
def test_where_no_ranks_were_launched_the_error_is_the_command_that_launches_them(started, name):
    stdout, stderr = started[name].communicate(timeout=120)
    assert started[name].returncode == 0, stderr
    wanted = "world size is 1 (this process alone), the plan needs 2 (dp_shard=2); launch with: torchrun --nproc-per-node 2"
    assert stdout == f"{wanted} {COMMANDS[name][1]}\n"

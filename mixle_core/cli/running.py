"""The commands that run on ranks: verification and training."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import click
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from mixle_core.audit import VerifyReport, verify
from mixle_core.cli.data import Corpus, causal_lm_loss, read_corpus, squared_loss, vocabulary
from mixle_core.cli.options import backends, load
from mixle_core.cli.report import console, ownership_table, verify_table
from mixle_core.errors import UsageError
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import LoadedPlugins
from mixle_core.receipts import StepReceipt
from mixle_core.runtime.session import Session, prepare

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _finish() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def verify_report(
    plan: ParallelPlan,
    loaded: LoadedPlugins,
    build: Callable[[], nn.Module],
    options: dict[str, Any],
    *,
    rows: int,
    length: int,
    clip: float,
) -> VerifyReport:
    """Verify `plan` on random token ids (or random rows) over three updates, a short window between two full ones."""
    vocab = vocabulary(build())
    width = None if vocab else next((m.in_features for m in build().modules() if isinstance(m, nn.Linear)), None)
    if vocab is None and width is None:
        raise UsageError("verify: the model has neither an embedding nor a Linear, so no input can be made for it")

    def batch(update: int, backward: int, data_rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((options["seed"], update, backward, data_rank)) % 2**63)
        if vocab is not None:
            return torch.randint(0, vocab, (rows, length), generator=generator)
        return torch.randn(rows, int(width or 1), generator=generator)

    full = plan.num_backwards
    return verify(
        build,
        plan,
        loss=causal_lm_loss if vocab else squared_loss,
        batch=batch,
        windows=[full, max(1, full // 2), full],
        max_grad_norm=clip or None,
        seed=options["seed"],
        backend=backends(options["backend"]),
        plugins=loaded,
    )


def _show_verified(report: VerifyReport, tolerance: float, as_json: bool) -> bool:
    passed = report.passed(tolerance)
    if _is_first() and as_json:
        click.echo(json.dumps({"passed": passed, "tolerance": tolerance, "error": report.error, **attrs.asdict(report)}))
    elif _is_first():
        console().print(verify_table(report))
        console().print(f"{'verified' if passed else 'WRONG'}: largest error {report.error:.1e}, tolerance {tolerance:.0e}")
    return passed


def run_verify(plan: ParallelPlan, options: dict[str, Any]) -> int:
    """`mixle verify` on one rank."""
    loaded, build = load(options["model_spec"])
    report = verify_report(plan, loaded, build, options, rows=options["rows"], length=options["length"], clip=options["clip"])
    tolerance = TOLERANCE[plan.precision] if options["tolerance"] is None else options["tolerance"]
    passed = _show_verified(report, tolerance, options["as_json"])
    _finish()
    return 0 if passed else 1


def _schedule(warmup: int, steps: int, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def run_train(plan: ParallelPlan, options: dict[str, Any]) -> int:
    """`mixle train` on one rank."""
    loaded, build = load(options["model_spec"])
    passed = True
    if options["verify_first"]:
        report = verify_report(plan, loaded, build, options, rows=2, length=32, clip=1.0)
        passed = _show_verified(report, TOLERANCE[plan.precision], options["as_json"])
    model = build()
    vocab = vocabulary(model)
    if vocab is None:
        raise UsageError("train: the model has no embedding; expected a language model over token ids")
    corpus = read_corpus(options["data"], options["sequence_length"], vocab)
    steps = options["steps"]
    session = prepare(
        model,
        plan,
        loss=causal_lm_loss,
        optimizer=partial(torch.optim.AdamW, lr=options["lr"], betas=(0.9, 0.95), weight_decay=options["weight_decay"]),
        schedule=partial(_schedule, options["warmup"], steps),
        max_grad_norm=options["max_grad_norm"] or None,
        seed=options["seed"],
        backend=backends(options["backend"]),
        plugins=loaded,
    )
    if _is_first() and not options["as_json"]:
        console().print(ownership_table(session.reduction.table))
        rows, length = corpus.train.shape
        console().print(f"{corpus.source}: {rows:,} rows of {length} tokens to train on, {len(corpus.held_out):,} held out")
    started = time.perf_counter()
    tokens = 0
    for receipt in _progress(_train(session, corpus, options), steps, options["as_json"]):
        tokens += receipt.num_tokens or 0
    seconds = time.perf_counter() - started
    loss = session.evaluate(_held_out(session, corpus, options))
    enough = options["require_below"] is None or loss < options["require_below"]
    if _is_first():
        result = {"held_out_nats_per_token": loss, "updates": steps, "seconds": seconds, "tokens_per_s": tokens / seconds}
        text = f"held out: {loss:.3f} nats per token after {steps} updates in {seconds:.0f} s ({tokens / seconds:,.0f} tokens/s)"
        click.echo(json.dumps(result) if options["as_json"] else text)
        if not enough:
            click.echo(f"the held-out loss is not below {options['require_below']}", err=True)
    session.close()
    _finish()
    return 0 if passed and enough else 1


def _data_position(session: Session) -> tuple[int, int]:
    plan, at = session.plan, session.reduction.mesh.coordinates
    return (at["dp_replicate"] * plan.dp_shard + at["dp_shard"]) * plan.cp + at["cp"], plan.data_size


def _train(session: Session, corpus: Corpus, options: dict[str, Any]) -> Iterator[StepReceipt]:
    rank, size = _data_position(session)
    for step in range(options["steps"] * session.plan.gradient_accumulation_steps):
        receipt = session.train_batch(corpus.batch(options["seed"], step, rank, size, options["batch_size"]))
        if receipt.committed:
            yield receipt


def _held_out(session: Session, corpus: Corpus, options: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The same number of batches on every data rank; together the first held-out rows, spread over all files."""
    rank, size = _data_position(session)
    rows = min(options["eval_rows"], len(corpus.held_out))
    picked = torch.linspace(0, len(corpus.held_out) - 1, rows).long().numpy()
    per_rank = max(1, rows // size)
    mine = picked[rank * per_rank : (rank + 1) * per_rank]
    for start in range(0, len(mine), options["batch_size"]):
        yield torch.from_numpy(corpus.held_out[mine[start : start + options["batch_size"]]].astype("int64"))


def _progress(receipts: Iterator[StepReceipt], steps: int, as_json: bool) -> Iterator[StepReceipt]:
    """Pass the receipts on; the first rank shows a bar on a terminal, a line now and then elsewhere, or JSON lines."""
    started = time.perf_counter()
    tokens = 0

    def text(receipt: StepReceipt) -> str:
        rate = tokens / max(time.perf_counter() - started, 1e-9)
        skipped = f" SKIPPED ({receipt.skipped})" if receipt.skipped else ""
        return f"loss {receipt.loss:.3f} norm {receipt.grad_norm:.2f} lr {receipt.learning_rate:.1e} {rate:,.0f} tokens/s{skipped}"

    if not _is_first():
        yield from receipts
        return
    out = console()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=as_json or not out.is_terminal) as bar:
        task = bar.add_task("training", total=steps, status="")
        for number, receipt in enumerate(receipts, 1):
            tokens += receipt.num_tokens or 0
            bar.update(task, advance=1, status=text(receipt))
            if as_json:
                click.echo(json.dumps(receipt.as_dict()))
            elif not out.is_terminal and (number % max(1, steps // 20) == 0 or number == 1):
                filled = 24 * number // steps
                click.echo(f"training [{'#' * filled}{'.' * (24 - filled)}] {number}/{steps} {text(receipt)}")
            yield receipt

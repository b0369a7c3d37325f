"""What `mixle train` does on each rank."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np

from mixle_core import StepReceipt, UsageError
from mixle_lm.command import say
from mixle_lm.corpus import BOUNDARY, Corpus, read_corpus
from mixle_lm.fit import as_json, cosine_schedule
from mixle_lm.lm import LM
from mixle_lm.loader import RowLoader
from mixle_lm.rows import Rows
from mixle_lm.saving import AUTO

_PROMPT = b"def "


def run(context: Any, options: dict[str, Any]) -> int:
    """Verify if asked, train, evaluate on what is held out, save and show. Returns the exit code."""
    _check_place(options["save_table"], (".md", ".json"))
    _check_place(options["save_receipts"], (".jsonl", ".csv"))
    if options["steps"] and options["epochs"]:
        raise UsageError(f"--steps {options['steps']} and --epochs {options['epochs']}: give one of them")
    _check_saving(options)
    corpus = read_corpus(options["data"])
    eos = corpus.eos_token_id if options["eos_token_id"] is None else options["eos_token_id"]
    held_out = corpus.held_out_rows(options["eval_rows"], options["sequence_length"])
    if options["verify_first"] and not context.verify(seed=options["seed"]):
        if context.first_rank:
            click.echo("the plan does not train as one process does: see above; nothing was trained", err=True)
        return 1
    lm = LM(context.build(), seed=options["seed"], plugins=context.plugins)
    dense = not options["last_position"]
    Rows(held_out, vocab_size=lm.vocab_size)  # ids outside the vocabulary show before training
    updates = _updates(lm, corpus, eos, context.plan, options, dense=dense)

    def show(receipt: StepReceipt) -> None:
        if context.as_json and context.first_rank:
            click.echo(json.dumps(as_json(receipt)))

    context.show_table(lm.explain(context.plan, context.backend))
    if not context.as_json:
        say(context, f"{corpus.source}: {len(corpus.train):,} ids to train on, {len(held_out):,} rows held out", {})
    result = lm.fit(
        corpus.train,
        dense=dense,
        sequence_length=options["sequence_length"],
        eos_token_id=eos,
        batch_size=options["batch_size"],
        steps=None if options["epochs"] else updates,
        epochs=options["epochs"],
        distributed=context.plan.world_size > 1,
        distributed_backend=context.backend,
        strict=options["strict"],
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        schedule=cosine_schedule(updates, warmup=options["warmup"]),
        max_grad_norm=options["max_grad_norm"] or None,
        save_to=options["save_to"],
        save_every=options["save_every"],
        keep=options["keep"],
        resume=options["resume"],
        callback=show,
        progress=not context.as_json,
        **attrs.asdict(context.plan),
    )
    loss = lm.evaluate(held_out, eos_token_id=eos, batch_size=options["batch_size"], dense=dense)
    number, rate = len(result.receipts), result.tokens_per_s
    if result.resumed is not None:
        say(context, f"went on after update {result.resumed}", {"resumed": result.resumed})
    if result.checkpoint is not None:
        say(context, f"saved {result.checkpoint}", {"checkpoint": str(result.checkpoint)})
    say(
        context,
        f"held out: {loss:.3f} nats per token after {number} updates in {result.seconds:.0f} s ({rate:,.0f} tokens/s)",
        {"held_out_nats_per_token": loss, "updates": number, "seconds": result.seconds, "tokens_per_s": rate},
    )
    if result.documents_separate is False:
        say(context, "the model lets packed documents look at each other", {"documents_separate": False})
    if options["save_table"]:
        context.save_table(result.table, options["save_table"])
    if options["save_receipts"] and context.first_rank:
        result.save(options["save_receipts"])
    if options["sample"]:
        _sample(context, lm, options["sample"], options["seed"], text=corpus.eos_token_id == BOUNDARY)
    lm.close()
    enough = options["require_below"] is None or loss < options["require_below"]
    if not enough and context.first_rank:
        click.echo(f"the held-out loss is not below {options['require_below']}", err=True)
    return 0 if enough else 1


def _updates(lm: LM, corpus: Corpus, eos: int | None, plan: Any, options: dict[str, Any], *, dense: bool) -> int:
    if not options["epochs"]:
        return int(options["steps"] or 300)
    rows = Rows(corpus.train, length=options["sequence_length"], vocab_size=lm.vocab_size, eos_token_id=eos, dense=dense)
    loader = RowLoader(rows, batch_size=options["batch_size"], data_size=plan.dp_replicate * plan.dp_shard, at_least=plan.microbatches)
    return math.ceil(loader.batches_left(options["epochs"]) / int(plan.gradient_accumulation_steps))


def _sample(context: Any, lm: LM, number: int, seed: int, *, text: bool) -> None:
    prompt = np.frombuffer(_PROMPT, dtype=np.uint8) if text else np.zeros(1, dtype=np.int64)
    ids = lm.generate(prompt, max_new_tokens=number, temperature=0.8, top_k=40, seed=seed)
    shown = (_PROMPT + bytes(ids)).decode("utf-8", "replace") if text else " ".join(map(str, ids))
    say(context, f"a sample:\n{shown}", {"sample": ids})


def _check_place(path: str | None, known: tuple[str, ...]) -> None:
    """Before hours of training, not behind them."""
    if path is not None and not path.endswith(known):
        raise UsageError(f"{path}: expected a name that ends in {' or '.join(known)}")
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {Path(path).resolve().parent}")


def _check_saving(options: dict[str, Any]) -> None:
    """In the words of the command line, and before anything is read."""
    for option, value in (("--save-every", options["save_every"]), ("--keep", options["keep"]), ("--resume", options["resume"])):
        if options["save_to"] is None and value is not None and (option != "--resume" or value == AUTO):
            raise UsageError(f"{option} {value} without --save; give the directory of the run")

"""`mixle train`: the language-model surface on the command line."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("train")
@click.option("--data", default="stdlib", show_default=True, help="'stdlib', a text file, a directory of text, or a .npy of token ids.")
@click.option(
    "--eos-token-id",
    type=click.IntRange(0),
    default=None,
    help="The id that ends a document in a .npy; text has a zero byte behind each file.",
)
@click.option("--steps", type=click.IntRange(1), default=None, help="Updates. [default: 300, unless --epochs]")
@click.option("--epochs", type=click.IntRange(1), default=None, help="Times that every row comes, instead of --steps.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Rows of each batch on each data rank.")
@click.option("--sequence-length", type=click.IntRange(1), default=128, show_default=True, help="Inputs of a row.")
@click.option("--last-position", is_flag=True, help="One target a row, at its last position; data parallelism only.")
@click.option("--lr", type=click.FloatRange(0), default=3e-3, show_default=True, help="Peak learning rate.")
@click.option("--warmup", type=click.IntRange(0), default=20, show_default=True, help="Updates of linear warmup; a cosine to 5 % follows.")
@click.option("--weight-decay", type=click.FloatRange(0), default=0.1, show_default=True)
@click.option("--max-grad-norm", type=click.FloatRange(0), default=1.0, show_default=True, help="0 leaves the gradients as they are.")
@click.option("--eval-rows", type=click.IntRange(1), default=256, show_default=True, help="Held-out rows to evaluate at the end.")
@click.option("--save", "save_to", type=click.Path(file_okay=False), default=None, help="Directory of the run, for its checkpoints.")
@click.option("--save-every", type=click.IntRange(1), default=None, help="Save every so many updates, beside the training.")
@click.option("--keep", type=click.IntRange(1), default=None, help="Leave the newest so many steps.")
@click.option("--resume", default=None, metavar="auto|DIR", help="Go on from the newest step of --save, if any, or of DIR.")
@click.option("--require-below", type=float, default=None, help="Exit 1 unless the held-out loss ends below this many nats per token.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--strict", is_flag=True, help="Compare the collectives of every update with the ownership table.")
@click.option("--verify", "verify_first", is_flag=True, help="Before training, compare the plan with one process.")
@click.option(
    "--sample", type=click.IntRange(0), default=0, help="After training, show so many ids of the model's own, as text where ids are bytes."
)
@click.option("--save-table", type=click.Path(dir_okay=False), default=None, help="Write the ownership table to a file, .md or .json.")
@click.option("--save-receipts", type=click.Path(dir_okay=False), default=None, help="Write the receipts to a file, .jsonl or .csv.")
def train(context: Any, **options: Any) -> int:
    """Train a language model on text or token ids."""
    from mixle_lm.trainer import run

    return run(context, options)


def say(context: Any, text: str, values: dict[str, Any]) -> None:
    """Tell the user, on the first rank: a line, or JSON."""
    if context.first_rank:
        click.echo(json.dumps(values) if context.as_json else text)

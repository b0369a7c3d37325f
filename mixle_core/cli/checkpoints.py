"""`mixle checkpoint`: what lies on disk, without processes and without running anything that lies there."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from mixle_core.errors import UsageError

if TYPE_CHECKING:
    from mixle_core.checkpoint import Checkpoint

_SLOW_S = 1.0
"""What takes longer shows a progress bar."""

_directory = click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def checkpoint() -> None:
    """List, show, verify, import and export checkpoints: no GPU, no processes, and nothing in them is run."""


@checkpoint.command("list")
@_directory
@_json
def list_steps(directory: Path, as_json: bool) -> int:
    """List the steps under DIR with their size, and why one does not load. Contents are not read: `verify` does."""
    from mixle_core.checkpoint import survey
    from mixle_core.cli.report import console, human_bytes

    found = survey(directory)
    if as_json:
        rows = [
            {
                "step": entry.step,
                "path": str(entry.path),
                "bytes": entry.num_bytes,
                "valid": entry.problem is None,
                "problem": entry.problem,
            }
            for entry in found
        ]
        click.echo(json.dumps(rows, indent=1))
    elif not found:
        click.echo(f"no step is committed under {directory}")
    else:
        from rich.markup import escape
        from rich.table import Table

        table = Table("step", "directory", "size", "state")
        for entry in found:
            table.add_row(
                str(entry.step), entry.path.name, human_bytes(entry.num_bytes) if entry.num_bytes else "-", escape(entry.problem or "whole")
            )
        console().print(table)
    return 1 if any(entry.problem for entry in found) else 0


@checkpoint.command()
@_directory
@click.option("--by-tensor", is_flag=True, help="One line for each tensor instead of each pattern.")
@_json
def show(directory: Path, by_tensor: bool, as_json: bool) -> int:
    """Show what is in a step: DIR is its directory, or one with steps, of which the latest is shown."""
    from mixle_core.checkpoint import CheckpointError, latest, open_checkpoint
    from mixle_core.cli.report import console, human_bytes

    chosen = directory
    if _holds_steps(directory):
        newest = latest(directory)
        if newest is None:
            raise UsageError(f"{directory}: no step in it is whole; way out: mixle checkpoint list {directory} says why")
        chosen = newest
    try:
        with open_checkpoint(chosen) as opened:
            if as_json:
                click.echo(json.dumps(_as_json(opened), indent=1))
                return 0
            out = console()
            success = opened.success
            versions = ", ".join(f"{name} {version}" for name, version in success.versions.items())
            size = human_bytes(sum(success.files.values()) + success.metadata_size)
            files = f"{size} in {len(success.files)} data files, {success.checksum} of every chunk"
            out.print(f"step {opened.step}, {files}; written by {versions}", markup=False, soft_wrap=True)
            out.print(_tensor_table(opened, by_tensor=by_tensor))
            for key, value in opened.values.items():
                if key != _OWNERS:
                    out.print(f"{key}: {_short(value)}", markup=False, soft_wrap=True)
    except CheckpointError as error:
        click.echo(f"mixle: {error}", err=True)
        return 1
    return 0


@checkpoint.command()
@_directory
@_json
def verify(directory: Path, as_json: bool) -> int:
    """Read every byte of a step, or of all steps under DIR, and compare every checksum. Exit 1 when anything is wrong."""
    from mixle_core.checkpoint import CheckpointError, open_checkpoint, survey

    paths = [entry.path for entry in survey(directory)] if _holds_steps(directory) else [directory]
    if not paths:  # to say nothing of nothing would pass for whole
        raise UsageError(f"{directory}: no step to verify; expected the directory of a run, or a step")
    rows = []
    for path in paths:
        started = time.perf_counter()
        row: dict[str, Any] = {"path": str(path), "valid": True, "bytes": 0, "problem": None}
        try:
            with open_checkpoint(path) as opened, _progress(f"verifying {path.name}") as tell:
                opened.verify(tell)
                row["bytes"] = sum(opened.success.files.values())
        except CheckpointError as error:
            row |= {"valid": False, "problem": str(error)}
        row["seconds"] = time.perf_counter() - started
        rows.append(row)
        if not as_json:
            from mixle_core.cli.report import human_bytes

            text = f"whole: {human_bytes(row['bytes'])} read in {row['seconds']:.1f} s" if row["valid"] else f"DAMAGED: {row['problem']}"
            click.echo(f"{path.name}: {text}")
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    return 0 if all(row["valid"] for row in rows) else 1


@checkpoint.command("import-dcp")
@click.argument("source", metavar="SRC", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("root", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option("--step", type=click.IntRange(min=0), help="Updates so far; by default as the optimizer's state says.")
@click.option("--model", metavar="KEY", help="Key of the model in the state dict that was saved.")
@click.option("--optimizer", metavar="CLASS", help="Class of the optimizer, where its options do not tell.")
@click.option("--buffer", "buffers", metavar="PATTERN", multiple=True, help="Names that are buffers and no parameters.")
@click.option("--tied", metavar="ALIAS=NAME", multiple=True, help="Two names of one parameter; their values must be equal.")
@click.option("--skip", metavar="PATTERN", multiple=True, help="Keys that are left out.")
@_json
def import_dcp(
    source: Path,
    root: Path,
    step: int | None,
    model: str | None,
    optimizer: str | None,
    buffers: tuple[str, ...],
    tied: tuple[str, ...],
    skip: tuple[str, ...],
    as_json: bool,
) -> int:
    """Write a checkpoint of torch.distributed.checkpoint (SRC) as a committed step under DIR. Nothing in it is run."""
    from mixle_core.checkpoint import CheckpointError
    from mixle_core.checkpoint import import_dcp as run
    from mixle_core.checkpoint.dcp import tied_pair

    try:
        with _progress(f"importing {source.name}") as tell:
            pairs = dict(map(tied_pair, tied))
            options: dict[str, Any] = {"step": step, "model": model, "optimizer": optimizer}
            made = run(source, root, **options, buffers=buffers, tied=pairs, skip=skip, progress=tell)
    except CheckpointError as error:
        click.echo(f"mixle: {error}", err=True)
        return 1
    if as_json:
        click.echo(json.dumps({**attrs.asdict(made), "path": str(made.path)}, indent=1))
        return 0
    click.echo(f"{made.path}: {len(made.parameters)} parameters, {len(made.buffers)} buffers, {made.optimizer or 'no optimizer'}")
    if made.rest:
        named = ", ".join(made.rest[:12])
        click.echo(f"kept beside them: {named}{f' and {len(made.rest) - 12} more' if len(made.rest) > 12 else ''}")
    for first, second in made.alike:
        click.echo(f"{first} and {second} are equal: if the model has them tied, import with --tied {second}={first}")
    return 0


@checkpoint.command("export-hf")
@_directory
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--like", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Copy config and tokenizer.")
@click.option("--max-shard-size", default="50GB", show_default=True, help="Of a file; in bytes, or with KB, MB, GB or TB.")
@_json
def export_hf(directory: Path, out: Path, like: Path | None, max_shard_size: str, as_json: bool) -> int:
    """Write the weights of a step as transformers has them, into OUT, which must not exist or be empty.

    DIR is the step's directory, or one with steps, of which the latest is taken.
    """
    from mixle_core.checkpoint import CheckpointError
    from mixle_core.checkpoint import export_hf as run

    try:
        with _progress(f"exporting {directory.name}") as tell:
            made = run(directory, out, like=like, max_shard_size=max_shard_size, progress=tell)
    except CheckpointError as error:
        click.echo(f"mixle: {error}", err=True)
        return 1
    if as_json:
        click.echo(json.dumps({**attrs.asdict(made), "path": str(made.path)}, indent=1))
        return 0
    beside = f"; beside them {', '.join(made.copied)}" if made.copied else ""
    click.echo(f"{made.path}: step {made.step}, {len(made.names)} tensors in {', '.join(made.files)}{beside}")
    if made.dtype:
        click.echo(f"config.json says dtype {made.dtype} now, as the weights have it")
    return 0


_OWNERS = "owners"
"""The value in which a save keeps who owned each tensor, by name."""


def _holds_steps(directory: Path) -> bool:
    """Whether this is a directory of steps, and not a step."""
    from mixle_core.checkpoint.files import SUCCESS, committed_step

    return not (directory / SUCCESS).exists() and (
        committed_step(directory.absolute().name) is None or any(committed_step(child.name) is not None for child in directory.iterdir())
    )


def _owner(opened: Checkpoint, name: str) -> str:
    owners = opened.values.get(_OWNERS)
    return str(owners.get(name, "-")) if isinstance(owners, dict) else "-"


def _tensor_table(opened: Checkpoint, *, by_tensor: bool) -> Any:
    from rich.markup import escape
    from rich.table import Table

    from mixle_core.cli.report import human_bytes
    from mixle_core.layout import generalise

    groups: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for name, kinds in opened.metadata.tensors.items():
        kept = ", ".join(f"{kind} {stored.dtype}" for kind, stored in kinds.items())
        shapes = " ".join(dict.fromkeys(str(list(stored.shape)) for stored in kinds.values()))
        chunks = " ".join(dict.fromkeys(str(len(stored.chunks)) for stored in kinds.values()))
        key = (name if by_tensor else generalise(name), shapes, kept, chunks, _owner(opened, name))
        groups.setdefault(key, []).append((name, sum(stored.num_bytes for stored in kinds.values())))
    for name, stored in opened.metadata.opaque.items():
        key = (name if by_tensor else generalise(name), str(list(stored.shape)), f"opaque {stored.dtype}", str(len(stored.chunks)), "-")
        groups.setdefault(key, []).append((name, stored.num_bytes))
    table = Table("tensor", "of", "shape", "kinds", "chunks", "owner", "size")
    for (pattern, shapes, kept, chunks, owner), members in groups.items():
        shown = members[0][0] if len(members) == 1 else pattern
        size = human_bytes(sum(number for _, number in members))
        table.add_row(escape(shown), str(len(members)), escape(shapes), escape(kept), chunks, escape(owner), size)
    return table


def _as_json(opened: Checkpoint) -> dict[str, Any]:
    from mixle_core.checkpoint.values import encode

    success = opened.success
    return {
        "path": str(opened.path),
        "step": opened.step,
        "checksum": success.checksum,
        "versions": dict(success.versions),
        "files": dict(success.files),
        "tensors": {
            name: {
                kind: {"dtype": stored.dtype, "shape": list(stored.shape), "chunks": len(stored.chunks), "bytes": stored.num_bytes}
                for kind, stored in kinds.items()
            }
            for name, kinds in opened.metadata.tensors.items()
        },
        "opaque": {key: {"dtype": stored.dtype, "shape": list(stored.shape)} for key, stored in opened.metadata.opaque.items()},
        "values": {key: encode(value, key) for key, value in opened.values.items()},
    }


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters; --json shows all)"


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told bytes done and their total, and shows a bar once that has taken a while."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from mixle_core.cli.report import console

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    task, started = bar.add_task(what, total=None), time.perf_counter()

    def tell(done: int, total: int) -> None:
        if time.perf_counter() - started >= _SLOW_S:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield tell
    finally:
        if bar.live.is_started:
            bar.stop()

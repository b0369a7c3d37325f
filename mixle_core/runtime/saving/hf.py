"""Weights of a local transformers directory, into a model under any plan: every rank reads its own blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mixle_core.checkpoint import CheckpointError, HfWeights
from mixle_core.layout import tied_names
from mixle_core.runtime.saving.held import Held, local_of, persistent_buffers, reshard
from mixle_core.runtime.saving.meeting import ARRIVE_WITHIN_S, Meeting, as_error
from mixle_core.runtime.saving.subject import Subject, subject_of
from mixle_core.runtime.state import PARAMETER


def load_hf_weights(model: Any, directory: str | Path, *, timeout_s: float = 600.0, wait_s: float = ARRIVE_WITHIN_S) -> None:
    """Fill a model with the weights of a local transformers directory (safetensors, one file or several with an index). Collective.

    Names are logical ones: those of the model without wrappers, as they stand in the files; transformers need not be installed.
    Values are converted to the dtype of the parameter. A parameter that is tied may stand under any of its names, or under
    several if they are equal. The format has no checksums, so only names, dtypes, shapes and sizes of files are verified:
    flipped bits in a file go unseen. Nothing else is loaded: an optimizer keeps its state, so load weights before the first update.

    Args:
        model: what `attach` returned; or any module, whose DTensors are filled as they lie.
        directory: the same files on every rank.
        timeout_s: of the collectives, for a model that no plan speaks for.
        wait_s: for ranks that do not call it.

    Raises:
        CheckpointError: on every rank: a name that is missing or that the model has not, another shape, a damaged file. The model's
            values are then undefined.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    subject = subject_of(model, size, timeout_s, 0, None)
    meeting = Meeting("load of weights", timeout_s=subject.timeout_s, wait_s=wait_s)
    buffers = persistent_buffers(subject.model, subject.transparent)
    everyones = meeting.gather(sorted(buffers))
    known = meeting.share(sorted({name for names in everyones for name in names}) if everyones is not None else None)
    failure: Exception | None = None
    try:
        with HfWeights(directory) as weights:
            _fill(subject, weights, buffers, known)
    except Exception as error:  # told to the other ranks before it is raised, so that none of them waits
        failure = as_error(error)
    meeting.settle(failure)


def _fill(subject: Subject, weights: HfWeights, buffers: Mapping[str, torch.Tensor], buffers_anywhere: Collection[str]) -> None:
    aliases = _aliases(subject)
    names = {name: [one for one in (name, *aliases.get(name, ())) if one in weights.weights] for name in subject.everywhere}
    _require_names(weights, names, aliases, buffers_anywhere)
    reshard(subject.model)
    reader = _Reader(weights, {name: found[0] for name, found in names.items()})
    elsewhere = subject.load_entries({}, reader)
    with torch.no_grad():
        for one in subject.held:
            for name in names[one.name]:
                _require_fit(weights, name, one.name, one.shape, one.parameter.dtype)
            _require_one(weights, one, names[one.name])
            if one.name not in elsewhere:
                for offset, view in one.views(one.parameter):
                    view.copy_(weights.block(names[one.name][0], offset, tuple(view.shape)))
        for name, buffer in buffers.items():
            local = local_of(buffer)
            _require_fit(weights, name, name, tuple(local.shape), local.dtype)
            local.copy_(weights.block(name, (0,) * local.dim(), tuple(local.shape)))


class _Reader:
    """What plugins read the parameters from that they hold in a way of their own."""

    def __init__(self, weights: HfWeights, names: Mapping[str, str]) -> None:
        self._weights = weights
        self._names = names

    def kinds(self, name: str) -> tuple[str, ...]:
        return (PARAMETER,) if name in self._names else ()

    def read(self, name: str, kind: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return self._weights.block(self._names[name], offset, shape).clone()


def _aliases(subject: Subject) -> Mapping[str, tuple[str, ...]]:
    facts = subject.facts["parameters"]
    if all("aliases" in fact for fact in facts.values()):
        return {name: tuple(fact["aliases"]) for name, fact in facts.items()}
    return {name: aliases for name, (_, aliases) in tied_names(subject.model, subject.transparent).items()}


def _require_names(
    weights: HfWeights, names: Mapping[str, Collection[str]], aliases: Mapping[str, Iterable[str]], buffers: Collection[str]
) -> None:
    missing = sorted([name for name, found in names.items() if not found] + [name for name in buffers if name not in weights.weights])
    expected = {one for name in names for one in (name, *aliases.get(name, ()))} | set(buffers)
    extra = sorted(weights.weights.keys() - expected)
    if missing or extra:
        lacks = f"no {missing[0]} ({len(missing)} missing)" if missing else ""
        more = f"{extra[0]}, which the model has not ({len(extra)} such)" if extra else ""
        raise CheckpointError(
            f"{weights.path}: {' and '.join(filter(None, (lacks, more)))}; expected the {len(names) + len(buffers)} tensors of the model; "
            "way out: build the model of that directory, tied or not as it is there",
            path=str(weights.path),
        )


def _require_fit(weights: HfWeights, name: str, wanted: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = weights.weights[name]
    if found.shape != shape or (found.dtype != dtype and not (found.dtype.is_floating_point and dtype.is_floating_point)):
        raise CheckpointError(
            f"{weights.path / found.file}: {name} is {found.dtype} of shape {list(found.shape)}; expected {dtype} of shape {list(shape)} "
            f"for {wanted}; way out: build the model of that directory",
            path=str(weights.path / found.file),
        )


def _require_one(weights: HfWeights, one: Held, names: Iterable[str]) -> None:
    """Names of one parameter have one value: what this rank holds of it is compared."""
    first, *others = names
    for other in others:
        for offset, view in one.views(one.parameter):
            size = tuple(view.shape)
            if not torch.equal(weights.block(first, offset, size), weights.block(other, offset, size)):
                raise CheckpointError(
                    f"{weights.path}: {first} and {other} differ, and the model has them tied; expected equal values; way out: build the "
                    "model untied (tie_word_embeddings=False)",
                    path=str(weights.path),
                )

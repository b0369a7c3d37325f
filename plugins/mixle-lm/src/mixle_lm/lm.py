"""`LM`: a language model with `fit`, `evaluate` and `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from mixle_core import CapabilityError, OwnershipTable, ParallelPlan, StepReceipt, UsageError, explain, prepare
from mixle_core.runtime import Session, launch_command, model_builder, vocabulary_size
from mixle_lm import fit as fitting
from mixle_lm.documents import documents_separate
from mixle_lm.generate import generate
from mixle_lm.loader import RowLoader
from mixle_lm.losses import causal_lm_loss, last_token_loss
from mixle_lm.rows import Rows
from mixle_lm.saving import Saving

log = structlog.get_logger(__name__)

_SPLIT = ("pp", "cp", "tp", "ep", "etp")
"""Axes that split the forward of a row, which an objective with one target a row does not have."""


class LM:
    """A language model that trains on token ids.

    Args:
        model: a module that takes `input_ids` (by that name, or first) and returns logits, or an object with `logits`;
            or `NAME:SIZE` of an installed plugin, such as `qwen3:tiny`; or `module:callable` that makes one.
        vocab_size: ids are below it; None takes `config.vocab_size`, or the size of the model's first embedding.
        seed: of initial values (of what is on meta), dropout and the order of rows.
        plugins: names to load instead of all installed ones; or name -> module of further plugins beside them.
        device: to train on; None takes this process's GPU where there is one, else the CPU.

    Attributes:
        session: the session that training uses, from the first `fit` on.
        loader: hands out the rows of the running or last `fit`; its `state_dict()` says where it stands.
    """

    def __init__(
        self,
        model: nn.Module | str,
        *,
        vocab_size: int | None = None,
        seed: int = 0,
        plugins: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(model, str):
            plugins, build = model_builder(model, plugins)
            model = build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"LM({type(model).__name__}): expected a torch.nn.Module, NAME:SIZE of a plugin, or module:callable")
        self.model = model
        self._plugins = plugins
        self._name = type(model).__name__  # sharding renames the class
        size = vocabulary_size(model) if vocab_size is None else vocab_size
        if size is None:
            raise UsageError(f"{self._name} has neither config.vocab_size nor an embedding; expected a language model over token ids")
        self.vocab_size = size
        self.seed = seed
        self.session: Session | None = None
        self.loader: RowLoader | None = None
        self._device = device
        self._backend: Any = None, False

    def fit(
        self,
        token_ids: Any,
        *,
        dense: bool = True,
        sequence_length: int | None = None,
        eos_token_id: int | None = None,
        batch_size: int = 8,
        steps: int | None = None,
        epochs: int | None = None,
        shuffle: bool = True,
        distributed: bool = False,
        distributed_backend: Any = None,
        strict: bool = False,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        optimizer: Any = None,
        schedule: Any = None,
        max_grad_norm: float | None = 1.0,
        loader_state: Mapping[str, Any] | None = None,
        save_to: str | Path | None = None,
        save_every: int | None = None,
        keep: int | None = None,
        resume: str | Path | None = None,
        callback: Callable[[StepReceipt], None] | None = None,
        progress: bool | None = None,
        **plan: Any,
    ) -> fitting.FitResult:
        """Train on `token_ids`. Collective under `distributed=True`: every rank passes the same.

        Args:
            token_ids: an array or tensor of integers, a `.npy` path, or an iterable of ids or of documents: see `Rows`.
            dense: every position has a target. False: only the last one of each row, under data parallelism alone.
            sequence_length: inputs of a row; by default 128, or what the rows have.
            eos_token_id: the id that ends a document, for token ids in one stream.
            batch_size: rows of a batch on each data rank; a batch is cut into `microbatches` backwards.
            steps: updates. By default one epoch.
            epochs: times that every row comes.
            distributed: train on the ranks that a launcher started. Without it, on this process alone.
            distributed_backend: label, or labels in order of preference; None when only one plugin claims.
            strict: compare the collectives of every update with the ownership table, as in `attach`.
            optimizer: `parameters -> Optimizer`, or pattern -> that; by default AdamW with `lr` and `weight_decay`.
            schedule: `optimizer -> LRScheduler`, stepped once per update, such as `cosine_schedule(steps)`.
            max_grad_norm: clip the global norm to this; None leaves it.
            loader_state: what `loader.state_dict()` said: the rows go on from there.
            save_to: directory of the run, where its last state is saved as a step.
            save_every: save every so many updates, too, beside the training.
            keep: leave the newest so many steps.
            resume: "auto" goes on from the newest step of `save_to`, if there is one; a directory from the newest step there, or from
                a step. Then `steps` and `epochs` count from the start of the run, and `loader_state` comes from the step.
            callback: called with the receipt of each update, on every rank.
            progress: False shows nothing, None a bar on a terminal, True also lines elsewhere.
            **plan: fields of ParallelPlan, such as `dp_shard=8, precision="bf16", microbatches=4, gradient_accumulation_steps=8`.

        Returns:
            The receipts, the ownership table and the time. A second `fit` under the same plan trains the same parameters on;
            its optimizer and schedule start anew, unless it resumes.

        Raises:
            UsageError: input that cannot be right.
            CapabilityError: no ranks were launched; its text ends with the command that launches them.
            MixleError: whatever else stands in the way of the plan, on every rank.
        """
        wanted = _plan(plan, distributed=distributed, dense=dense)
        saving = Saving(save_to, save_every, keep, resume)
        rows = Rows(
            token_ids,
            length=sequence_length,
            vocab_size=self.vocab_size,
            eos_token_id=eos_token_id,
            dense=dense,
        )
        session = self._attach(
            wanted,
            distributed_backend,
            strict,
            loss=causal_lm_loss if dense else last_token_loss,
            optimizer=optimizer or partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay),
            schedule=schedule,
            max_grad_norm=max_grad_norm,
        )
        self.session = session  # the model is cut from here on, whatever is refused below
        loader = self._loader(rows, session, batch_size, shuffle=shuffle, at_least=wanted.microbatches)
        if loader_state is not None:
            loader.load_state_dict(loader_state)
        options = {"dense": dense, "eos_token_id": eos_token_id, "batch_size": batch_size, "steps": steps, "epochs": epochs}
        session.reduction.require_alike("fit", {**options, **loader.state_dict()})
        resumed = saving.resumed(session, loader)
        batches = fitting.num_batches(loader, steps, epochs, wanted.gradient_accumulation_steps, done=resumed)
        self.loader = loader
        separate = self._documents_separate(session, rows) if rows.documents else None
        session.module.train()
        receipts, seconds = fitting.run(session, loader, batches, callback=callback, progress=progress, saved=saving.after)
        checkpoint = saving.finish(session, loader)
        if separate:  # weights that start at zero may have hidden what documents tell each other
            separate = self._documents_separate(session, rows)
        return fitting.FitResult(receipts, session.reduction.table, seconds, separate, resumed, checkpoint)

    def _documents_separate(self, session: Session, rows: Rows) -> bool:
        separate = documents_separate(session, rows)
        if not separate and session.reduction.mesh.rank == 0:
            log.warning(
                "documents_attend_to_each_other",
                model=self._name,
                way_out="harmless for one text; to keep documents apart the forward takes position_ids and masks where they restart",
            )
        return separate

    def evaluate(
        self,
        token_ids: Any,
        *,
        sequence_length: int | None = None,
        eos_token_id: int | None = None,
        batch_size: int = 8,
        dense: bool = True,
    ) -> float:
        """Mean loss per token in nats, over all rows and data ranks. Collective; nothing of the model changes.

        Before the first `fit` it is that of one process.

        Args:
            token_ids, sequence_length, eos_token_id, batch_size, dense: as in `fit`.
        """
        session = self._ready()
        rows = Rows(token_ids, length=sequence_length, vocab_size=self.vocab_size, eos_token_id=eos_token_id, dense=dense)
        loader = self._loader(rows, session, batch_size, shuffle=False, at_least=1)
        session.reduction.require_alike("evaluate", {"dense": dense, "batch_size": batch_size, **loader.state_dict()})
        return session.evaluate((batch.tensors for batch in loader), loss=causal_lm_loss if dense else last_token_loss)

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
        eos_token_id: int | None = None,
    ) -> list[int]:
        """The ids that follow `prompt`, without it. Collective; every rank gets the same.

        One forward over the whole text for each new id: enough to look at what a model learned.

        Args:
            prompt: ids of one text: an array, a tensor or a list.
            temperature: 0 takes the likeliest id; above 0 ids are drawn, the more evenly the higher it is.
            top_k: draw from so many of the likeliest ids only.
            seed: of the drawing.
            eos_token_id: stop behind this id.
        """
        session = self._ready()
        context = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        return generate(
            session,
            prompt,
            vocab_size=self.vocab_size,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            eos_token_id=eos_token_id,
            context=context,
        )

    def explain(self, plan: ParallelPlan, backend: Any = None) -> OwnershipTable:
        """Who would reduce what under `plan`: no process group, nothing changes."""
        return explain(self.model, plan, backend=backend, plugins=self._plugins)

    def close(self) -> None:
        """Give the model back without hooks; its parameters stay as they are cut."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def _loader(self, rows: Rows, session: Session, batch_size: int, *, shuffle: bool, at_least: int) -> RowLoader:
        plan, at = session.plan, session.reduction.mesh.coordinates
        return RowLoader(
            rows,
            batch_size=batch_size,
            data_rank=at["dp_replicate"] * plan.dp_shard + at["dp_shard"],
            data_size=plan.dp_replicate * plan.dp_shard,
            at_least=at_least,
            seed=self.seed,
            shuffle=shuffle,
        )

    def _attach(self, plan: ParallelPlan, backend: Any, strict: bool, **options: Any) -> Session:
        if self.session is None:
            self._backend = backend, strict
            shared = {"seed": self.seed, "plugins": self._plugins, "device": self._device, "strict": strict}
            return prepare(self.model, plan, backend=backend, **shared, **options)
        if plan != self.session.plan or (backend, strict) != self._backend:
            raise UsageError(f"the model is cut and owned as {self.session.plan.describe()}; fit under the same ones, or build a new LM")
        return Session(self.session.reduction, **options)

    def _ready(self) -> Session:
        if self.session is None:
            self.session = self._attach(
                ParallelPlan(), None, False, loss=causal_lm_loss, optimizer=torch.optim.AdamW, schedule=None, max_grad_norm=None
            )
        return self.session


def _plan(fields: Mapping[str, Any], *, distributed: bool, dense: bool) -> ParallelPlan:
    try:
        plan = ParallelPlan(**fields)
    except TypeError as error:
        raise UsageError(
            f"fit: {str(error).replace('ParallelPlan.__init__() ', '')}; expected its own options or fields of ParallelPlan"
        ) from error
    if not dense:
        split = [f"{axis}={plan.size(axis)}" for axis in plan.active if axis in _SPLIT]
        if split:
            raise CapabilityError(
                f"one target a row (dense=False, --last-position) is data parallel only, not {', '.join(split)}; leave out one of them"
            )
    if distributed and plan.world_size == 1:
        raise UsageError("distributed=True with a plan of one process: say how the ranks are used, such as dp_shard=8")
    if not distributed and plan.world_size > 1:
        raise UsageError(
            f"{plan.describe()} needs {plan.world_size} processes: pass distributed=True and launch with: {launch_command(plan.world_size)}"
        )
    return plan

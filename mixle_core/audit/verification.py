"""Run a plan and one process side by side on the same tokens, and compare gradients, norms and parameters by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mixle_core.audit.classify import RIGHT
from mixle_core.audit.compare import assemble, assemble_copies, relative_error
from mixle_core.audit.window import AuditReport, audit
from mixle_core.declarations import parameter_facts
from mixle_core.errors import UsageError
from mixle_core.layout import Layouts
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import load_plugins
from mixle_core.runtime.attaching import ask_to_fill, attach
from mixle_core.runtime.contracts import Loss
from mixle_core.runtime.gradients import Reduced
from mixle_core.runtime.initialise import logical_parameters, place_parameters
from mixle_core.runtime.models import Plugins
from mixle_core.runtime.reduction import Reduction

Batch = Callable[[int, int, int], Any]
"""`(update, backward, data rank) -> microbatch`: what that rank trains on."""


@attrs.frozen
class UpdateReport:
    """Errors of one update against one process: the worst gradient and parameter by name, both norms, and the copies.

    Args:
        cause: what the worst gradient looks like, in words, where it is wrong.
    """

    gradient_error: float
    worst_gradient: str
    norm_error: float
    inf_norm_error: float
    parameter_error: float
    worst_parameter: str
    copies_equal: bool
    num_tokens: int
    loss_error: float
    skipped: str | None = None
    cause: str | None = None

    @property
    def error(self) -> float:
        """The largest of all errors."""
        return max(self.gradient_error, self.norm_error, self.inf_norm_error, self.parameter_error, self.loss_error)


@attrs.frozen
class VerifyReport:
    """One verified plan: a report per update, the traffic of the last one, and the verdict at a tolerance."""

    plan: ParallelPlan
    updates: tuple[UpdateReport, ...]
    collectives: Mapping[str, int]
    payload_bytes: Mapping[str, int]

    @property
    def error(self) -> float:
        """The largest error of all updates."""
        return max(update.error for update in self.updates)

    def passed(self, tolerance: float) -> bool:
        """Whether every update trained on tokens, every error is within `tolerance` and all copies are equal to the bit."""
        trained = all(update.num_tokens > 0 for update in self.updates)
        return trained and self.error <= tolerance and all(update.copies_equal for update in self.updates)


def reference_model(build: Callable[[], nn.Module], seed: int, like: Reduction | None = None) -> nn.Module:
    """The model in one process, filled as `attach` fills it: with the names and plugins of `like`, or without a plugin."""
    model = build()
    layouts = like.layouts if like else Layouts(parameters=parameter_facts(model), modules={}, units=())
    fill = ask_to_fill(like.plugins if like else load_plugins([]))
    place_parameters(model, layouts, seed, torch.device("cpu"), lambda name, tensor: tensor, fill)
    return model


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a verification.

    Its epsilon is above the rounding of fp32 gradients: with 1e-8, an element whose true gradient is zero takes a step that
    rounding noise decides, so that two runs of one process with their rows in another order differ as much.
    """
    return torch.optim.AdamW(parameters, lr=3e-4, eps=1e-6, weight_decay=0.1)


def verify(
    build: Callable[[], nn.Module],
    plan: ParallelPlan,
    *,
    loss: Callable[[nn.Module, Any], tuple[torch.Tensor, int]],
    batch: Batch,
    windows: Sequence[int] | None = None,
    max_grad_norm: float | None = None,
    seed: int = 0,
    backend: str | Sequence[str] | None = None,
    plugins: Plugins = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    strict: bool = False,
) -> VerifyReport:
    """Train `plan` and one process for a few updates and compare them after each. Collective; every rank gets the report.

    Args:
        build: makes the model, equal on every call; on meta it is filled from `seed`.
        loss: as in `prepare`.
        batch: `(update, backward, data rank) -> microbatch`: what that data rank trains on, the same wherever it is asked for.
        windows: backwards of each update; one shorter than the plan's ends inside `no_sync()`. None: three full ones.
        max_grad_norm: clip in both.
        optimizer: used for both.
        strict: compare the collectives of every update with the table, too.
    """
    reduction = attach(build(), plan, backend=backend, seed=seed, plugins=plugins, strict=strict)
    sides = _Sides(reduction, reference_model(build, seed, reduction), loss, batch)
    ours, theirs = reduction.build_optimizer(optimizer), optimizer(sides.reference.values())
    _require_equal_start(gathered(reduction, sides.trainable), sides.reference)
    reports = []
    receipts: Mapping[str, tuple[int, int]] = {}
    for update, length in enumerate(windows or [plan.num_backwards] * 3):
        found = sides.audit(update, length)
        reduced, wanted_tokens, wanted_loss = sides.reduced, sides.wanted_tokens, sides.wanted_loss
        inf_norm = reduced.norm(math.inf)
        reference_norms = [_norm([p.grad for p in sides.reference.values()], kind) for kind in (2.0, math.inf)]
        errors = {name: math.inf if name in found.zeros else verdict.error for name, verdict in found.verdicts.items()}
        if reduced.skipped is None:
            if max_grad_norm is not None:
                reduced.clip_(max_grad_norm)
                torch.nn.utils.clip_grad_norm_(sides.reference.values(), max_grad_norm)
            if ours is not None:
                ours.step()
            theirs.step()
        reduction.zero()
        theirs.zero_grad()
        parameters = gathered(reduction, sides.trainable)
        drift = {name: relative_error(parameters[name][0], parameter.detach()) for name, parameter in sides.reference.items()}
        worst, drifted = max(errors, key=lambda name: errors[name]), max(drift, key=lambda name: drift[name])
        verdict = found.verdicts[worst]
        reports.append(
            UpdateReport(
                gradient_error=errors[worst],
                worst_gradient=worst,
                norm_error=_difference(reduced.norm(), reference_norms[0]),
                inf_norm_error=_difference(inf_norm, reference_norms[1]),
                parameter_error=drift[drifted],
                worst_parameter=drifted,
                copies_equal=not found.drifted and all(equal for _, equal in parameters.values()),
                num_tokens=reduced.num_tokens,
                loss_error=_difference(reduced.loss, wanted_loss) if wanted_tokens == reduced.num_tokens else math.inf,
                skipped=reduced.skipped,
                cause=None if verdict.kind == RIGHT else f"{verdict.kind}: {verdict.evidence}",
            )
        )
        receipts = {owner.owner: (owner.num_collectives, owner.payload_bytes) for owner in reduced.owners}
    reduction.close()
    return VerifyReport(
        plan=plan,
        updates=tuple(reports),
        collectives={owner: number for owner, (number, _) in receipts.items()},
        payload_bytes={owner: size for owner, (_, size) in receipts.items()},
    )


class _Sides:
    """The attached model and one process, each with its window for `audit`; both keep what the rest of an update needs."""

    def __init__(self, reduction: Reduction, reference: nn.Module, loss: Loss, batch: Batch) -> None:
        self._reduction, self._model, self._loss, self._batch = reduction, reference, loss, batch
        self._plan = reduction.mesh.plan
        self.trainable = {name: p for name, p in reduction.named_parameters() if p.requires_grad}
        named = logical_parameters(reference, reduction.layouts.transparent)
        self.reference = {name: p for name, p in named.items() if p.requires_grad}
        self._rows = {row.name: row for row in reduction.table.rows}
        self._groups = {
            axis: sorted({self._plan.group_ranks(rank, [axis]) for rank in range(self._plan.world_size)}) for axis in self._plan.active
        }
        self.reduced: Reduced
        self.wanted_tokens, self.wanted_loss = 0, 0.0

    def audit(self, update: int, length: int) -> AuditReport:
        """Compare one window of `length` backwards; no gradient is changed afterwards, on either side."""
        backwards = [(update, backward) for backward in range(length)]
        found = audit(self._ours, self._theirs, backwards, groups=self._groups, tolerance=_WRONG[self._plan.precision], whole=self._whole)
        if len(found.wrong):  # then one process ran single microbatches, too
            self._theirs(backwards)
        return found

    def _whole(self, name: str, pieces: Sequence[torch.Tensor | None]) -> Mapping[int, torch.Tensor | None]:
        return assemble_copies(self._plan, self._rows[name], pieces)

    def _ours(self, backwards: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor | None]:
        position, plan = self._reduction.mesh.coordinates, self._plan
        data_rank = (position["dp_replicate"] * plan.dp_shard + position["dp_shard"]) * plan.cp + position["cp"]
        # a session scales from its second update on, and whatever adds to the loss has to follow
        scale = 2.0**-6 if backwards[0][0] else 1.0
        rows = [self._batch(update, backward, data_rank) for update, backward in backwards]
        loss_sum, tokens = self._reduction.run(rows, self._loss, loss_scale=scale, last=len(rows) == plan.num_backwards)
        self.reduced = self._reduction.finish(tokens, float(loss_sum), loss_scale=scale)
        return {name: None if tensor is None else _local(tensor) for name, tensor in self.reduced.gradients.items()}

    def _theirs(self, backwards: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor | None]:
        batches = [[self._batch(*at, data_rank) for data_rank in range(self._plan.data_size)] for at in backwards]
        self.wanted_tokens, self.wanted_loss = reference_window(self._model, self.reference, self._loss, batches)
        return {name: parameter.grad for name, parameter in self.reference.items()}


def reference_window(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], loss: Loss, batches: Sequence[Sequence[Any]]
) -> tuple[int, float]:
    """Leave in `parameters` the gradients of the mean loss over all tokens of some backwards in one process.

    Args:
        batches: for each backward, the microbatch of each data rank.

    Returns:
        The number of tokens, and the mean loss.
    """
    model.zero_grad(set_to_none=True)
    tokens, loss_sum = 0, 0.0
    for microbatches in batches:
        for microbatch in microbatches:
            value, number = loss(model, microbatch)
            value.backward()
            tokens += number
            loss_sum += float(value.detach())
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad /= max(tokens, 1)
    return tokens, loss_sum / max(tokens, 1)


_WRONG = {"fp32": 1e-4, "bf16": 6e-2}
"""Relative error of a gradient from which it is not right any more, and worth a cause."""


def _require_equal_start(ours: Mapping[str, tuple[torch.Tensor | None, bool]], theirs: Mapping[str, torch.Tensor]) -> None:
    odd = [name for name, (values, _) in ours.items() if relative_error(values, theirs[name].detach()) > 0.0]
    if odd:
        raise UsageError(
            f"two models of one build() start with different values ({len(odd)} parameters, such as {odd[0]}); expected the same at every "
            "call: seed it inside, as with torch.manual_seed(0), or build on torch.device('meta') and let the seed fill it"
        )


def gathered(reduction: Reduction, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, tuple[torch.Tensor | None, bool]]:
    """Name -> the whole of what lies on all ranks, and whether copies are equal to the bit. Collective."""
    mine = {name: None if t is None else _local(t) for name, t in tensors.items()}
    everyone = reduction.mesh.gather_objects(mine)
    plan, table = reduction.mesh.plan, reduction.table
    return {row.name: assemble(plan, row, [theirs.get(row.name) for theirs in everyone]) for row in table.rows}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def _norm(gradients: Iterable[torch.Tensor | None], kind: float) -> float:
    return float(torch.nn.utils.get_total_norm([g.double() for g in gradients if g is not None], kind))


def _difference(value: float, reference: float) -> float:
    if not math.isfinite(value) or not math.isfinite(reference):
        return 0.0 if not math.isfinite(value) and not math.isfinite(reference) else math.inf
    return abs(value - reference) / abs(reference) if reference else abs(value)

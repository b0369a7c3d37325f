"""Run a plan and one process side by side on the same tokens, and compare gradients, norms and parameters by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mixle_core.audit.classify import classify
from mixle_core.audit.compare import assemble, relative_error
from mixle_core.declarations import parameter_facts
from mixle_core.errors import UsageError
from mixle_core.layout import Layouts
from mixle_core.plan import ParallelPlan
from mixle_core.plugins import load_plugins
from mixle_core.runtime.initialise import logical_parameters, place_parameters
from mixle_core.runtime.models import Plugins
from mixle_core.runtime.reduction import Reduction, ask_to_fill, attach

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
) -> VerifyReport:
    """Train `plan` and one process for a few updates and compare them after each. Collective; every rank gets the report.

    Args:
        build: makes the model, equal on every call; on meta it is filled from `seed`.
        loss: as in `prepare`.
        batch: `(update, backward, data rank) -> microbatch`: what that data rank trains on, the same wherever it is asked for.
        windows: backwards of each update; one shorter than the plan's ends inside `no_sync()`. None: three full ones.
        max_grad_norm: clip in both.
        optimizer: used for both.
    """
    reduction = attach(build(), plan, backend=backend, seed=seed, plugins=plugins)
    trainable = {name: p for name, p in reduction.named_parameters() if p.requires_grad}
    ours = reduction.build_optimizer(optimizer)
    reference = reference_model(build, seed, reduction)
    theirs_by_name = {name: p for name, p in logical_parameters(reference, reduction.layouts.transparent).items() if p.requires_grad}
    theirs = optimizer(theirs_by_name.values())
    _require_equal_start(_gathered(reduction, trainable), theirs_by_name)
    reports = []
    receipts: Mapping[str, tuple[int, int]] = {}
    for update, length in enumerate(windows or [plan.num_backwards] * 3):
        backwards = partial(_one_update, reduction, loss, batch, update, length, full=length == plan.num_backwards)
        reduced = backwards()
        wanted_tokens, wanted_loss = _reference_update(reference, theirs_by_name, loss, batch, update, length, plan.data_size)
        gradients = _gathered(reduction, reduced.gradients)
        inf_norm = reduced.norm(math.inf)
        reference_norms = [_norm([p.grad for p in theirs_by_name.values()], kind) for kind in (2.0, math.inf)]
        reference_gradients = {name: None if p.grad is None else p.grad.clone() for name, p in theirs_by_name.items()}
        errors = {name: relative_error(gradients[name][0], reference_gradients[name]) for name in theirs_by_name}
        copies = all(equal for _, equal in gradients.values())
        if reduced.skipped is None:
            if max_grad_norm is not None:
                reduced.clip_(max_grad_norm)
                torch.nn.utils.clip_grad_norm_(theirs_by_name.values(), max_grad_norm)
            if ours is not None:
                ours.step()
            theirs.step()
        reduction.zero()
        theirs.zero_grad()
        parameters = _gathered(reduction, trainable)
        copies = copies and all(equal for _, equal in parameters.values())
        drift = {name: relative_error(parameters[name][0], theirs_by_name[name].detach()) for name in theirs_by_name}
        worst, drifted = max(errors, key=lambda name: errors[name]), max(drift, key=lambda name: drift[name])
        reports.append(
            UpdateReport(
                gradient_error=errors[worst],
                worst_gradient=worst,
                norm_error=_difference(reduced.norm(), reference_norms[0]),
                inf_norm_error=_difference(inf_norm, reference_norms[1]),
                parameter_error=drift[drifted],
                worst_parameter=drifted,
                copies_equal=copies,
                num_tokens=reduced.num_tokens,
                loss_error=_difference(reduced.loss, wanted_loss) if wanted_tokens == reduced.num_tokens else math.inf,
                skipped=reduced.skipped,
                cause=_cause(plan, gradients[worst][0], reference_gradients[worst]) if errors[worst] > _WRONG[plan.precision] else None,
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


_WRONG = {"fp32": 1e-4, "bf16": 6e-2}
"""Relative error of a gradient from which it is worth a cause."""


def _cause(plan: ParallelPlan, gradient: torch.Tensor | None, reference: torch.Tensor | None) -> str:
    """What one wrong gradient, put together from all ranks, looks like beside the reference."""
    groups = {axis: [list(range(plan.size(axis)))] for axis in plan.active}
    verdict = classify([gradient], [reference], groups=groups)
    return f"{verdict.kind}: {verdict.evidence}"


def _require_equal_start(ours: Mapping[str, tuple[torch.Tensor | None, bool]], theirs: Mapping[str, torch.Tensor]) -> None:
    odd = [name for name, (values, _) in ours.items() if relative_error(values, theirs[name].detach()) > 0.0]
    if odd:
        raise UsageError(
            f"two models of one build() start with different values ({len(odd)} parameters, such as {odd[0]}); expected the same at every "
            "call: seed it inside, as with torch.manual_seed(0), or build on torch.device('meta') and let the seed fill it"
        )


def _one_update(reduction: Reduction, loss: Any, batch: Batch, update: int, length: int, *, full: bool) -> Any:
    plan = reduction.mesh.plan
    position = reduction.mesh.coordinates
    data_rank = (position["dp_replicate"] * plan.dp_shard + position["dp_shard"]) * plan.cp + position["cp"]
    scale = 2.0**-6 if update else 1.0  # a session scales from its second update on, and whatever adds to the loss has to follow
    rows = [batch(update, backward, data_rank) for backward in range(length)]
    loss_sum, tokens = reduction.run(rows, loss, loss_scale=scale, last=full)
    return reduction.finish(tokens, float(loss_sum), loss_scale=scale)


def _reference_update(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], loss: Any, batch: Batch, update: int, length: int, data_size: int
) -> tuple[int, float]:
    tokens, loss_sum = 0, 0.0
    for backward in range(length):
        for data_rank in range(data_size):
            value, number = loss(model, batch(update, backward, data_rank))
            value.backward()
            tokens += number
            loss_sum += float(value.detach())
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad /= max(tokens, 1)
    return tokens, loss_sum / max(tokens, 1)


def _gathered(reduction: Reduction, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, tuple[torch.Tensor | None, bool]]:
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

"""A declaration is a prediction: at the first update, compare what ranks of a model axis computed before any reduction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from mixle_core.errors import DeclarationError, LedgerError, explain_failure
from mixle_core.layout import Replica
from mixle_core.ownership import OwnershipTable, describe_role
from mixle_core.runtime.groups import CONTROL, Mesh
from mixle_core.runtime.initialise import derive_seed

_ROUNDING = {"fp32": 1e-3, "bf16": 6e-2}
"""Relative spread up to which complete gradients of one parameter agree."""

_EQUAL = 1e-6
"""Relative spread below which partial gradients are the same numbers and so cannot be terms of a sum."""


class Probe:
    """Collects two numbers per parameter and model axis, norm and one fixed random projection, and judges them once."""

    def __init__(self, table: OwnershipTable, mesh: Mesh, seed: int) -> None:
        self._mesh = mesh
        self._seed = seed
        self._rows = {row.name: row for row in table.rows}
        self._undecided = {(row.name, axis) for row in table.rows for axis in row.model_replica_axes}
        self._seen: dict[str, tuple[float, float]] = {}
        self._shown: set[str] = set()

    @property
    def done(self) -> bool:
        """Whether every declaration was confirmed; the same on every rank."""
        return not self._undecided

    def observe(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Note the local gradients of replicas, before any reduction over a model axis."""
        wanted = {name for name, _ in self._undecided}
        self._shown |= gradients.keys()
        for name, gradient in gradients.items():
            if name not in wanted or not gradient.numel():
                continue
            values = gradient.detach().reshape(-1).to("cpu", torch.float64)
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "probe", name))
            direction = torch.randn(values.numel(), generator=generator, dtype=torch.float64)
            self._seen[name] = (float(values.norm()), float(values @ direction) / values.numel() ** 0.5)

    def require(self, reduced: Iterable[str]) -> None:
        """Raise LedgerError when an owner reduced a replica of a model axis without showing its local gradient."""
        hidden = sorted({name for name, _ in self._undecided} & set(reduced) - self._shown)
        self._shown.clear()
        if hidden:
            owner = self._rows[hidden[0]].owner
            raise LedgerError(
                f"{owner} reduced {hidden[0]} ({len(hidden)} in all) without calling observe() first, so its declaration cannot be checked"
            )

    def judge(self) -> None:
        """Compare over each model axis; a rank without a gradient, and all-zero ones, leave the parameter undecided.

        Raises:
            DeclarationError: on every rank, naming parameter, axis, what was declared and what was seen.
        """
        contradictions: dict[tuple[str, str], str] = {}
        confirmed: list[tuple[str, str]] = []
        for axis in sorted({axis for _, axis in self._undecided}):
            names = sorted(name for name, on in self._undecided if on == axis)
            group = self._mesh.group((axis,), CONTROL)
            mine = torch.tensor([self._seen.get(name, (0.0, 0.0)) for name in names], dtype=torch.float64, device=self._mesh.device)
            everyone = [torch.empty_like(mine) for _ in range(self._mesh.plan.size(axis))]
            dist.all_gather(everyone, mine, group=group)
            for index, name in enumerate(names):
                verdict = self._verdict(name, axis, torch.stack([seen[index] for seen in everyone]).cpu())
                if verdict is None:
                    continue
                if verdict:
                    contradictions[name, axis] = verdict
                else:
                    confirmed.append((name, axis))
        self._seen.clear()
        # ranks of different data coordinates may have seen different things: decided anywhere is decided, wrong anywhere is wrong
        gathered = self._mesh.gather_objects((confirmed, contradictions))
        self._undecided -= {tuple(pair) for theirs, _ in gathered for pair in theirs}
        first: dict[tuple[str, str], str] = {}
        for _, found in gathered:
            first = {**found, **first}
        wrong = [first[pair] for pair in sorted(first)]
        if wrong:
            raise DeclarationError(
                explain_failure(
                    f"{len(wrong)} declarations are contradicted by the first gradients",
                    wrong,
                    "complete when all ranks compute alike, partial when each uses its own heads or tokens; where the layout says so "
                    "already, a boundary further on is wrong or ranks of the axis got different rows. `mixle verify` decides",
                )
            )

    def _verdict(self, name: str, axis: str, seen: torch.Tensor) -> str | None:
        role = self._rows[name].roles[axis]
        assert isinstance(role, Replica)
        if role.ranks is not None:
            seen = seen[list(role.ranks)]
        norms = seen[:, 0]
        largest = float(norms.max())
        if largest == 0.0 or not torch.isfinite(seen).all():
            return None
        spread = float((seen.max(dim=0).values - seen.min(dim=0).values).max()) / largest
        numbers = ", ".join(f"{norm:.4g}" for norm in norms.tolist())
        says = f"{name} on {axis}: declared {describe_role(role)}"
        if role.gradient == "complete" and spread > _ROUNDING[self._mesh.plan.precision]:
            return f"{says}, but the ranks' gradients differ by {spread:.2g} (norms {numbers})"
        if role.gradient == "partial" and spread < _EQUAL:
            return f"{says}, but all ranks computed the same gradient (norms {numbers})"
        return ""

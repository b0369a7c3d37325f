"""What all ranks must have prepared alike, its digest, and the first place where two ranks differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mixle_core.layout import Layouts
from mixle_core.ownership import OwnershipTable, canonical_json, describe_role
from mixle_core.plan import ParallelPlan


def agreement_document(
    plan: ParallelPlan, plugins: Iterable[tuple[str, str]], layouts: Layouts, table: OwnershipTable, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that ranks must share, as JSON values.

    Args:
        plugins: (name, version) of the loaded plugins.
        extra: further values, such as the seed and library versions.
    """
    return {
        "plan": plan.as_dict(),
        "plugins": dict(plugins),
        "extra": dict(extra),
        "sequence": list(layouts.sequence),
        "units": list(layouts.units),
        "parameters": [
            {
                "name": layout.name,
                "shape": list(layout.shape),
                "dtype": layout.dtype,
                "trainable": layout.trainable,
                "aliases": list(layout.aliases),
                "roles": {axis: describe_role(role) for axis, role in layout.roles.items()},
            }
            for layout in layouts.parameters.values()
        ],
        "table": table.as_dict()["rows"],
    }


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of `document` in canonical JSON."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def first_difference(documents: Sequence[Mapping[str, Any]]) -> str:
    """One line that names the odd rank and the first place where it differs from the majority."""
    texts = [canonical_json(document) for document in documents]
    usual = max(set(texts), key=lambda text: (texts.count(text), -texts.index(text)))
    odd = next(rank for rank, text in enumerate(texts) if text != usual)
    reference = texts.index(usual)
    where, mine, theirs = _difference(documents[odd], documents[reference], "")
    return f"rank {odd} differs from rank {reference} at {where}: {mine} against {theirs}"


def _difference(mine: Any, theirs: Any, path: str) -> tuple[str, str, str]:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*mine, *theirs}):
            if key not in mine or key not in theirs:
                return f"{path}.{key}".lstrip("."), _short(mine.get(key, "absent")), _short(theirs.get(key, "absent"))
            if canonical_json(mine[key]) != canonical_json(theirs[key]):
                return _difference(mine[key], theirs[key], f"{path}.{key}")
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)) and canonical_json(mine) != canonical_json(theirs):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if canonical_json(a) == canonical_json(b):
                continue
            if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
                return _difference(a, b, f"{path}[{index}]")
            if a.get("name") != b.get("name"):
                return _difference(a.get("name"), b.get("name"), f"{path}[{index}].name")
            return _difference(a, b, f"{path}[{a.get('name', index)}]")
        longer, which = (mine, "only there") if len(mine) > len(theirs) else (theirs, "absent there")
        extra = longer[min(len(mine), len(theirs))]
        label = extra.get("name", extra) if isinstance(extra, Mapping) else extra
        return f"{path}[{label}]".lstrip("."), f"{len(mine)} entries ({which})", f"{len(theirs)} entries"
    return path.lstrip("."), _short(mine), _short(theirs)


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 80 else text[:77] + "..."

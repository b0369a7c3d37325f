"""What an update leaves behind: gradients handed over by owners, and the receipt of one `train_batch`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch


@attrs.frozen(eq=False)
class Gradient:
    """One parameter's final gradient as it lies on this rank.

    Args:
        tensor: local values, per rank; scaling and clipping change them in place. None when no rank used the parameter.
        weight: how much this rank's values count in a norm over the world: 1 over the number of ranks holding copies.
    """

    tensor: torch.Tensor | None
    weight: float


@attrs.frozen(eq=False)
class OwnerReduction:
    """What an owner hands over at the end of an update.

    Args:
        gradients: logical name -> final local gradient, for every row the owner has.
        counts: logical name -> how often the owner reduced it in this update. A parameter nobody used is absent.
    """

    gradients: Mapping[str, Gradient]
    counts: Mapping[str, int]


@attrs.frozen
class OwnerReceipt:
    """What one owner did in an update: parameters it reduced, and the collectives and payload bytes counted per rank."""

    owner: str
    num_parameters: int
    num_collectives: int
    payload_bytes: int


@attrs.frozen
class StepReceipt:
    """What one `train_batch` did. Only the receipt that commits an update has the fields after `committed`.

    Args:
        loss: mean loss per token, over this rank's tokens of the batch before the commit, over all tokens of the update after it.
        num_local_tokens: loss tokens of this rank in this batch; 0 when a window is committed without a batch.
        num_local_examples: rows of this rank in this batch.
        microbatches: backwards of this batch.
        accumulation: batches of this rank in the update.
        num_update_local_tokens: loss tokens of this rank in the update; `num_update_local_examples` its rows.
        num_tokens: loss tokens of the update over all data ranks; `num_examples` its rows.
        grad_norm: global norm before clipping.
        learning_rate: of the first optimizer of this rank; None when this rank has nothing to train.
        clip_factor: what the gradients were multiplied with, 1.0 when the norm was below the limit.
        skipped: why the optimizer did not step, or None.
        owners: what each owner reduced, with the collectives and bytes of the whole update.
    """

    update: int
    loss: float
    num_local_tokens: int
    num_local_examples: int
    microbatches: int
    committed: bool
    accumulation: int | None = None
    num_update_local_tokens: int | None = None
    num_update_local_examples: int | None = None
    num_tokens: int | None = None
    num_examples: int | None = None
    grad_norm: float | None = None
    clip_factor: float | None = None
    learning_rate: float | None = None
    skipped: str | None = None
    owners: tuple[OwnerReceipt, ...] = ()

    def __str__(self) -> str:
        if not self.committed:
            return f"update {self.update}, batch waiting: loss {self.loss:.4f} over {self.num_local_tokens} tokens of this rank"
        owners = "".join(f"; {o.owner}: {o.num_collectives} collectives, {o.payload_bytes:,} bytes" for o in self.owners)
        state = f"SKIPPED ({self.skipped})" if self.skipped else f"norm {self.grad_norm:.4f}, lr {self.learning_rate or 0.0:.2e}"
        return f"update {self.update}: loss {self.loss:.4f} over {self.num_tokens} tokens, {state}{owners}"

    def as_dict(self) -> dict[str, Any]:
        """Fields and values, ready for JSON."""
        return attrs.asdict(self)

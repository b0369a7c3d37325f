"""The two small models that the measurements train, with the gradients of one process to compare with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

VOCAB, WIDTH, ROWS, LENGTH = 32, 16, 2, 8
TOKENS = ROWS * LENGTH
"""Loss tokens of one backward on one rank."""


class Decoder(nn.Module):
    """Embedding, two blocks with sizes that no number of ranks divides, head; `skip` leaves out the last block."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
        """Logits of shape [rows, length, VOCAB]."""
        hidden = self.embed(ids)
        for block in list(self.blocks)[: -1 if skip else None]:
            hidden = hidden + block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def decoder(*, tied: bool = False) -> Decoder:
    """The same values wherever it is built."""
    torch.manual_seed(0)
    return Decoder(tied=tied)


def summed_loss(model: Any, update: int, backward: int, data_rank: int, device: torch.device, *, skip: bool = False) -> torch.Tensor:
    """The summed loss of one rank's backward on its own tokens."""
    generator = torch.Generator().manual_seed(1 + 10007 * update + 101 * backward + data_rank)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator).to(device)
    return F.cross_entropy(model(ids, skip=skip).flatten(0, 1).float(), ids.flatten(), reduction="sum")


class Block(nn.Module):
    """A norm that sees this rank's part of the sequence, so its gradient is one term, and two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, values: Any) -> Any:
        """Shape [rows, length, WIDTH] in and out; DTensors cut along the length when parallelised."""
        return values + self.down(F.gelu(self.up(self.norm(values))))


class SequenceModel(nn.Module):
    """Linear, two blocks, linear; `mesh` cuts the sequence over tp between the linears."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 4)
        self.mesh: DeviceMesh | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Shape [rows, length, WIDTH] to [rows, length, 4]."""
        hidden: Any = self.enter(values)
        if self.mesh is not None:
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        for block in self.blocks:
            hidden = block(hidden)
        if self.mesh is not None:
            # what follows is computed alike by every tp rank, so the gradient that comes back is whole on each
            hidden = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return self.leave(hidden)  # type: ignore[no-any-return]


def sequence_model(device: torch.device, mesh: DeviceMesh | None = None, *, rowwise: bool = False) -> SequenceModel:
    """The whole model, or the one with torch's own tensor and sequence parallelism over `mesh`.

    Args:
        rowwise: cut the second linear along dimension 1, as torch's own recipe does, and not along 0.
    """
    torch.manual_seed(0)
    model = SequenceModel().to(device)
    if mesh is not None:
        model.mesh = mesh
        column = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1), use_local_output=False)
        down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False) if rowwise else column
        up = ColwiseParallel(input_layouts=Shard(1)) if rowwise else column
        for block in model.blocks:
            parallelize_module(block, mesh, {"norm": SequenceParallel(), "up": up, "down": down})
    return model


def squared_output(model: Any, data_rank: int, device: torch.device) -> torch.Tensor:
    """A summed loss of the sequence model on one data rank's values."""
    values = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1 + data_rank))
    loss: torch.Tensor = model(values.to(device)).square().sum()
    return loss

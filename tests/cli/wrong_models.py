"""Models for tests of the command line, found as `wrong_models:NAME`."""

import torch
from torch import nn

_calls = 0


def plain():
    """Linear layers, no embedding, equal on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def unrepeatable():
    """Other values at every call: there is nothing to compare with."""
    global _calls  # noqa: PLW0603
    _calls += 1
    torch.manual_seed(_calls)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


class _Moody(nn.Sequential):
    """Scales by the number of models built so far: the run and its reference cannot agree."""

    def forward(self, x):
        return super().forward(x) * self.factor


def moody():
    """Equal values at every call, and not what it computes with them."""
    global _calls  # noqa: PLW0603
    _calls += 1
    torch.manual_seed(0)
    model = _Moody(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    model.factor = float(_calls)
    return model


class Undeclared(nn.Module):
    """No layout plugin knows it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

"""Optimizers and schedules by logical name: one factory for all parameters, or a route per pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mixle_core.errors import UsageError
from mixle_core.layout import matches
from mixle_core.ownership import Bid, OwnershipTable, exactly_one

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]
OptimizerSpec = Factory | Mapping[str, Factory]
Schedule = Callable[[Optimizer], LRScheduler]


Build = Callable[[Factory, Iterable[str]], Optimizer | None]
"""Takes a factory and logical names; returns None where this rank holds none of them."""


def build_optimizers(spec: OptimizerSpec, table: OwnershipTable, build: Build) -> dict[str, Optimizer]:
    """Pattern -> optimizer over the parameters it routes and this rank holds; a single factory is the route `**`.

    Args:
        spec: any `parameters -> Optimizer`, or pattern -> that. Exactly one pattern routes a parameter.
        table: of all trainable parameters, wherever they lie.
        build: makes one.

    Raises:
        OwnershipError: a parameter that no pattern or several patterns route.
        UsageError: a pattern that routes nothing, or a factory that does not return an optimizer.
    """
    routes = spec if isinstance(spec, Mapping) else {"**": spec}
    names = [row.name for row in table.rows]
    bids = [Bid(pattern, [name for name in names if matches(pattern, name)], pattern) for pattern in routes]
    for bid in bids:
        if not bid.keys:
            raise UsageError(f"optimizer pattern {bid.bidder!r} routes no trainable parameter")
    chosen = exactly_one(
        names,
        bids,
        what="each trainable parameter needs exactly one optimizer",
        way_out={"nobody": 'add a pattern for them, such as "**"', "several": "make the optimizer patterns disjoint"},
    )
    built: dict[str, Optimizer] = {}
    for pattern, factory in routes.items():
        if not callable(factory):
            raise UsageError(
                f"optimizer {pattern!r} is a {type(factory).__name__}; expected what makes one from parameters, such as "
                "partial(torch.optim.AdamW, lr=3e-4): the parameters are new once the model is cut"
            )
        optimizer = build(_checked(factory, pattern), [name for name in names if chosen[name].value == pattern])
        if optimizer is not None:
            built[pattern] = optimizer
    return built


def _checked(factory: Factory, pattern: str) -> Factory:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = factory(parameters)
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer {pattern!r}: the factory returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        return optimizer

    return make

"""Optimizers and schedules by logical name: one factory for all parameters, or a route per pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mixle_core.errors import UsageError
from mixle_core.layout import matches
from mixle_core.ownership import Bid, exactly_one

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]
OptimizerSpec = Factory | Mapping[str, Factory]
Schedule = Callable[[Optimizer], LRScheduler]


def build_optimizers(spec: OptimizerSpec, parameters: Mapping[str, nn.Parameter]) -> dict[str, Optimizer]:
    """Pattern -> optimizer over the parameters it routes; a single factory is the route `**`.

    Args:
        spec: any `parameters -> Optimizer`, or pattern -> that. Exactly one pattern routes a parameter.
        parameters: logical name -> trainable parameter.

    Raises:
        OwnershipError: a parameter that no pattern or several patterns route.
        UsageError: a pattern that routes nothing, or a factory that does not return an optimizer.
    """
    routes = spec if isinstance(spec, Mapping) else {"**": spec}
    bids = [Bid(pattern, [name for name in parameters if matches(pattern, name)], pattern) for pattern in routes]
    for bid in bids:
        if not bid.keys:
            raise UsageError(f"optimizer pattern {bid.bidder!r} routes no trainable parameter")
    chosen = exactly_one(
        parameters,
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
        optimizer = factory([parameter for name, parameter in parameters.items() if chosen[name].value == pattern])
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"optimizer {pattern!r}: the factory returned {type(optimizer).__name__}, expected a torch.optim.Optimizer")
        built[pattern] = optimizer
    return built

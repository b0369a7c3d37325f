"""What passes between the modules of a model in one forward and backward, as the caller of each module sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor

from mixle_core.audit._upstream import without_gradient_hooks
from mixle_core.layout import logical_name

OUTPUT = "->"

Place = tuple[str, int, int | str]
"""Module, how often it was called before in this forward, and position or keyword of an input, or OUTPUT."""

Forward = Callable[[nn.Module, Any], torch.Tensor]
"""Runs a model on one batch; returns the tensor that its loss would take."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def held(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank holds, on the CPU and without a graph."""
    return local(tensor.detach()).detach().cpu().clone()


def every_parameter(model: nn.Module) -> dict[str, nn.Parameter]:
    """Logical name -> parameter, tied ones under every name."""
    return {logical_name(raw): parameter for raw, parameter in model.named_parameters(remove_duplicate=False)}


@attrs.define(eq=False)
class Use:
    """One tensor as it enters or leaves a module.

    Args:
        value: this rank's, of any type; integers too.
        edge: where its gradient passes, of this module's use alone; None when it has none.
        sources: places that its value was computed from, without a further place in between.
        parameters: those that stand between it and its sources.
        direct: it is the very tensor of its one source.
        unit: elements behind the last but one dim when it is another view of its source, such as the size of a head.
    """

    value: torch.Tensor
    edge: GradientEdge | None
    sources: frozenset[Place] = frozenset()
    parameters: frozenset[str] = frozenset()
    direct: bool = False
    unit: int | None = None
    gradient: torch.Tensor | None = None


@attrs.define(eq=False)
class Trace:
    """One forward and backward.

    Args:
        uses: place -> tensor.
        calls: module -> arguments of its first call, as its caller passed them.
        output: what the model returned, with the places that it was computed from.
        gradients: logical name -> gradient before anybody reduces it.
    """

    uses: dict[Place, Use] = attrs.field(factory=dict)
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = attrs.field(factory=dict)
    output: Use | None = None
    gradients: dict[str, torch.Tensor | None] = attrs.field(factory=dict)


class _Recorder:
    """Hooks that give every tensor at a module a node of its own in the graph, and remember it."""

    def __init__(self, model: nn.Module, *, follow: bool) -> None:
        self.trace = Trace()
        self._follow = follow
        self._parameters = {id(parameter): name for name, parameter in every_parameter(model).items()}
        self._nodes: dict[Node, Place] = {}
        self._copies: dict[int, tuple[torch.Tensor, Place]] = {}
        self._counts: dict[str, int] = {}
        self._open: dict[str, list[int]] = {}
        self._handles: list[Any] = []
        for raw, module in model.named_modules():
            name = logical_name(raw)
            before, after = self._before(name), self._after(name)
            # first before and last after: whatever a framework's hooks communicate lies inside
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            call = self._counts[name] = self._counts.get(name, -1) + 1
            self._open.setdefault(name, []).append(call)
            self.trace.calls.setdefault(name, (args, kwargs))
            args = tuple(self.record((name, call, index), value) for index, value in enumerate(args))
            return args, {key: self.record((name, call, key), value) for key, value in kwargs.items()}

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            place = (name, self._open[name].pop(), OUTPUT)
            if isinstance(output, torch.Tensor):
                return self.record(place, output)
            if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
                items = [self.record(place, output[0]), *output[1:]]
                return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
            return output

        return hook

    def record(self, place: Place, value: Any) -> Any:
        """Remember a tensor; what is returned takes its place."""
        if not isinstance(value, torch.Tensor):
            return value
        if not (value.is_floating_point() and value.requires_grad and torch.is_grad_enabled()):
            self.trace.uses[place] = Use(held(value), None)
            return value
        use = self.described(value)
        copy = value.clone()
        use.edge = get_gradient_edge(copy)
        self.trace.uses[place] = use
        if self._follow:
            self._nodes[use.edge.node] = place
            self._copies[copy.untyped_storage().data_ptr()] = (copy, place)
        return copy

    def described(self, value: torch.Tensor) -> Use:
        """A tensor, and where it comes from."""
        if not self._follow:
            return Use(held(value), None)
        use = Use(held(value), None, *self._sources(value))
        known = self._copies.get(value.untyped_storage().data_ptr())
        if known is not None and {known[1]} == use.sources and known[0].numel() == value.numel():
            use.direct = known[0].shape == value.shape
            if known[0].dim() + 1 == value.dim() and known[0].shape[:-1] == value.shape[:-2]:
                use.unit = value.shape[-1]
        return use

    def _sources(self, value: torch.Tensor) -> tuple[frozenset[Place], frozenset[str]]:
        found, passed, seen, waiting = set(), set(), set(), [value.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._nodes:
                found.add(self._nodes[node])
            elif id(variable := getattr(node, "variable", None)) in self._parameters:
                passed.add(self._parameters[id(variable)])
            else:
                waiting.extend(following for following, _ in node.next_functions)
        return frozenset(found), frozenset(passed)


@contextlib.contextmanager
def _measurable(model: nn.Module) -> Iterator[None]:
    """Every parameter has a gradient, nothing is random, and no hook on a parameter runs; at the end all is as before."""
    parameters = list(model.parameters())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad and parameter.is_floating_point()]
    training = [module for module in model.modules() if module.training]
    for parameter in frozen:
        parameter.requires_grad_(True)
    model.eval()
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module in training:
            module.training = True


def traced(
    model: nn.Module, forward: Forward, batch: Any, seed_of: Callable[[torch.Tensor], torch.Tensor], *, follow: bool = False
) -> Trace:
    """Run `model` once each way; gradients are those of the inner product of its output with what `seed_of` gives.

    Args:
        seed_of: from the output that this rank holds to the gradient that enters there, of the same shape.
        follow: find out where tensors come from, in a model of plain tensors.
    """
    parameters = every_parameter(model)
    with _measurable(model), torch.enable_grad():
        recorder = _Recorder(model, follow=follow)
        try:
            output = forward(model, batch)
        finally:
            recorder.close()
        trace = recorder.trace
        trace.output = recorder.described(output)
        mine = local(output)
        scalar = (mine * seed_of(held(output)).to(mine)).sum()
        edges = {place: use.edge for place, use in trace.uses.items() if use.edge is not None}
        # hooks on accumulated gradients do not run here
        with without_gradient_hooks(parameters.values()):
            wanted: list[Any] = [*parameters.values(), *edges.values()]
            found = torch.autograd.grad(scalar, wanted, allow_unused=True)
    trace.gradients = dict(zip(parameters, map(_taken, found), strict=False))
    for place, gradient in zip(edges, found[len(parameters) :], strict=True):
        trace.uses[place].gradient = _taken(gradient)
    return trace


def _taken(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else held(gradient)


def portable(trace: Trace) -> Mapping[Place, tuple[torch.Tensor, torch.Tensor | None]]:
    """Values and gradients by place, to hand to another rank."""
    return {place: (use.value, use.gradient) for place, use in trace.uses.items()}

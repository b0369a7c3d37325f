"""How a module's own code computes on slices of its weights: run it on them, beside the whole, and look at what comes out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from mixle_core.audit.infer_slices import SHARED, WHOLE, close, lie, piece
from mixle_core.layout import Lie, Replica, Role, Shard, Term

_Key = int | str


@attrs.frozen
class Inside:
    """What a module computes with on one rank's share.

    Args:
        inputs: position or keyword -> how the module's code has to see it.
        output: what it then returns.
        roles: of the parameters that it holds itself and that are copies.
        once, lookup: as in `ModuleLayout`.
    """

    inputs: Mapping[_Key, Lie]
    output: Lie
    roles: Mapping[str, Role]
    once: tuple[str, ...] = ()
    lookup: str | None = None


class Experiment:
    """One module of the reference, with its parameters moved by some noise so that zeros and ones hide nothing.

    Args:
        roles: name in the module -> role; sub-modules' too.
        call: arguments of a call.
        seen: input -> how it lies on the ranks outside, to be tried first.
    """

    def __init__(
        self,
        module: nn.Module,
        roles: Mapping[str, Role],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        seen: Mapping[_Key, Lie],
        *,
        number: int,
        tolerance: float,
    ) -> None:
        self.module, self.roles, self.seen, self.number, self.tolerance = module, roles, seen, number, tolerance
        self.args, self.kwargs = call
        self.said = ""
        self._noise = torch.Generator().manual_seed(1)
        self._own = [name for name, _ in module.named_parameters(recurse=False)]
        self._whole = {name: self._moved(parameter.detach()) for name, parameter in module.named_parameters(remove_duplicate=False)}
        self._values: dict[_Key, torch.Tensor] = {key: self._argument(key).detach() for key in seen}
        self._hints = [role.parts for role in roles.values() if isinstance(role, Shard) and role.parts]

    def _argument(self, key: _Key) -> torch.Tensor:
        return self.args[key] if isinstance(key, int) else self.kwargs[key]  # type: ignore[no-any-return]

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        size = float(values.double().square().mean().sqrt()) or 1.0
        return values + (0.3 * size * torch.randn(values.shape, generator=self._noise)).to(values)

    def run(self) -> Inside | None:
        """The first way of computing on slices that gives the right values and gradients; None leaves the reason in `said`."""
        copies = tuple(name for name in self._own if isinstance(self.roles[name], Replica))
        out, grads = self._once(self._whole, self._values, None)
        seed = torch.randn(out.shape, generator=self._noise).to(out)
        wanted = grads(seed)
        lookups = [name for name in self._own if isinstance(role := self.roles[name], Shard) and role.dim == 0 and role.parts is None]
        ways = itertools.product(lookups[:1] if not self.seen else [], [()])
        for lookup, once in [*((None, once) for once in ((), *([copies] if copies else []))), *ways]:
            for fed in itertools.product(*(self._choices(key) for key in self.seen)):
                found = self._attempt(dict(zip(self.seen, fed, strict=True)), once, lookup, out, seed, wanted)
                if found is not None:
                    return found
        return None

    def _choices(self, key: _Key) -> list[Lie]:
        """How an input may have to be fed: as it lies outside, whole, or as a slice of its last dim."""
        outside = self.seen[key]
        as_outside: list[Lie] = [outside] if isinstance(outside, Shard) else []
        divides = self._values[key].dim() and self._values[key].shape[-1] % self.number == 0
        return list(dict.fromkeys([*as_outside, WHOLE, *([Shard(-1)] if divides else [])]))

    def _attempt(
        self,
        fed: dict[_Key, Lie],
        once: tuple[str, ...],
        lookup: str | None,
        whole_out: torch.Tensor,
        seed: torch.Tensor,
        wanted: dict[Any, torch.Tensor | None],
    ) -> Inside | None:
        outs, runs = [], []
        for rank in range(self.number):
            parameters = {name: self._share(self._whole[name], self.roles[name], rank) for name in self._whole}
            idle = once if rank else ()
            values = {key: self._share(self._values[key], fed[key], rank) for key in fed}
            try:
                out, grads = self._once(parameters, values, lookup, rank=rank, idle=idle)
            except Exception as error:  # the user's code on shapes that it may not expect
                self.said = self.said or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                return None
            outs.append(out.detach())
            runs.append(grads)
        output = lie(outs, [None] * self.number, whole_out.detach(), None, self._hints, self.tolerance)
        if output is None:
            self.said = f"the ranks return shape {list(outs[0].shape)}, neither slices nor terms of {list(whole_out.shape)}"
            return None
        seeds = [self._share(seed, output, rank) for rank in range(self.number)]
        found = [grads(given) for grads, given in zip(runs, seeds, strict=True)]
        inputs = {key: self._input(fed[key], [grads[key] for grads in found], wanted[key]) for key in fed}
        roles = {name: self._parameter(self.roles[name], [grads[name] for grads in found], wanted[name]) for name in self._own}
        odd = [str(name) for name, value in (*inputs.items(), *roles.items()) if value is None]
        if odd:
            self.said = f"the gradient of {odd[0]} is neither whole nor a term on the ranks"
            return None
        return Inside(
            inputs={key: value for key, value in inputs.items() if value is not None},
            output=output,
            roles={name: role for name, role in roles.items() if isinstance(role, Replica)},
            once=once,
            lookup=lookup,
        )

    def _share(self, whole: torch.Tensor, role: Lie, rank: int) -> torch.Tensor:
        if not isinstance(role, Shard):
            return whole
        return piece(whole, role.dim, role.parts, self.number, rank)

    def _input(self, fed: Lie, grads: list[torch.Tensor | None], wanted: torch.Tensor | None) -> Lie | None:
        if isinstance(fed, Shard):
            return fed if self._slices(fed, grads, wanted) else None
        return self._replica(grads, wanted)

    def _parameter(self, role: Role, grads: list[torch.Tensor | None], wanted: torch.Tensor | None) -> Role | None:
        if isinstance(role, Shard):
            return role if self._slices(role, grads, wanted) else None
        return self._replica(grads, wanted)

    def _slices(self, role: Shard, grads: list[torch.Tensor | None], wanted: torch.Tensor | None) -> bool:
        if wanted is None:
            return all(grad is None for grad in grads)
        mine = [piece(wanted, role.dim, role.parts, self.number, rank) for rank in range(self.number)]
        return close(
            [torch.zeros_like(want) if grad is None else grad for grad, want in zip(grads, mine, strict=True)], mine, self.tolerance
        )

    def _replica(self, grads: list[torch.Tensor | None], wanted: torch.Tensor | None) -> Replica | None:
        if wanted is None:
            return WHOLE if all(grad is None for grad in grads) else None
        given = [torch.zeros_like(wanted) if grad is None else grad for grad in grads]
        if close(given, [wanted] * len(given), self.tolerance):
            return WHOLE
        return SHARED if close([torch.stack([grad.double() for grad in given]).sum(0)], [wanted], self.tolerance) else None

    def _once(
        self,
        parameters: Mapping[str, torch.Tensor],
        values: Mapping[_Key, torch.Tensor],
        lookup: str | None,
        *,
        rank: int = 0,
        idle: Sequence[str] = (),
    ) -> tuple[torch.Tensor, Any]:
        """Run the module's forward; returns its first result, and what turns a gradient of that into those of its leaves."""
        leaves = {name: values_.detach().clone().requires_grad_(values_.is_floating_point()) for name, values_ in parameters.items()}
        given = {key: value.clone().requires_grad_(True) for key, value in values.items()}
        used = {name: leaf * 0.0 if name in idle else leaf for name, leaf in leaves.items()}
        args = [given.get(index, _plain(value)) for index, value in enumerate(self.args)]
        kwargs = {key: given.get(key, _plain(value)) for key, value in self.kwargs.items()}
        foreign = None
        with contextlib.ExitStack() as stack, torch.enable_grad():
            if lookup is not None:
                foreign = self._localise(stack, args, kwargs, parameters[lookup].shape[0], rank)
            out = torch.func.functional_call(self.module, used, tuple(args), kwargs)
            out = out[0] if isinstance(out, (tuple, list)) else out
            if foreign is not None:
                out = out.masked_fill(foreign.unsqueeze(-1), 0.0)
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"it returned {type(out).__name__}, not a tensor")
        wanted: dict[Any, torch.Tensor] = {**{name: leaf for name, leaf in leaves.items() if leaf.requires_grad}, **given}

        def grads(seed: torch.Tensor) -> dict[Any, torch.Tensor | None]:
            if not out.requires_grad:
                return dict.fromkeys(wanted)
            found = torch.autograd.grad(out, list(wanted.values()), seed, allow_unused=True)
            return dict(zip(wanted, found, strict=True))

        return out, grads

    def _localise(self, stack: contextlib.ExitStack, args: list[Any], kwargs: dict[str, Any], rows: int, rank: int) -> torch.Tensor:
        """Turn indices into those of this rank's rows, as an executor does; returns which of them are other ranks'."""
        key = 0 if args else next(iter(kwargs))
        held: Any = args or kwargs
        indices = held[key] - rows * rank
        foreign = (indices < 0) | (indices >= rows)
        held[key] = indices.masked_fill(foreign, 0)
        stack.enter_context(_padding(self.module, rows * rank, rows))
        return foreign  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _padding(module: nn.Module, first: int, rows: int) -> Iterator[None]:
    before = getattr(module, "padding_idx", None)
    if before is not None:
        module.padding_idx = before - first if first <= before < first + rows else None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is not None:
            module.padding_idx = before


def settled(found: Lie | None) -> Lie | None:
    """A term is summed where it leaves the module that made it, wherever a framework does it: both are exact."""
    return WHOLE if isinstance(found, Term) else found


def produced(seen: Lie, sources: Iterable[Lie | None], *, direct: bool, cutting: bool) -> Lie | str:
    """How a tensor lies before the code between its sources and this module converts it, or why that cannot be said.

    Args:
        seen: how it lies as it enters the module.
        sources: how the tensors lie that it was made from.
        direct: it is its one source itself.
        cutting: slices of weights stand between, so that a slice is made by computing.
    """
    found = {source for source in sources if source is not None}
    if not found:
        return seen
    cut = {source for source in found if isinstance(source, Shard)}
    if isinstance(seen, Shard):
        return WHOLE if found == {WHOLE} and not cutting else seen
    if cut:
        if direct:
            return next(iter(cut))
        return "it is whole and made of slices: they are put together in code between modules, where no boundary can stand"
    if seen == SHARED and found == {WHOLE}:
        return WHOLE
    if seen == SHARED and WHOLE in found:
        return "its gradient is a term, and it is made of values with whole gradients and of others in code between modules"
    return seen

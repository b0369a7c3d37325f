"""What a Megatron model's parameters are on each axis, from what Megatron notes on them and from where they stand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from mixle_core import CapabilityError, ModelLayout, ModuleLayout, ParallelPlan, Replica, Role, Shard
from mixle_core.runtime import logical_parameters, named_modules


@attrs.frozen(eq=False)
class Held:
    """One parameter with the module that holds it and the modules around that, innermost first."""

    parameter: nn.Parameter
    module: Any
    around: tuple[Any, ...]


def declared(whole: nn.Module, config: Any, plan: ParallelPlan) -> tuple[ModelLayout, ...]:
    """One layout for each model axis of `plan`.

    Args:
        whole: the model with global shapes, its parameters marked as Megatron marks them under `plan`.
        config: with the sizes of `plan`.
    """
    found = _held(whole)
    roles: dict[str, dict[str, Role]] = {axis: {} for axis in ("pp", "tp", "ep", "etp")}
    stages = _Stages(whole, config, plan) if plan.pp > 1 else None
    folded = plan.ep > 1 or plan.size("etp") != plan.tp
    for name, held in found.items():
        expert = folded and getattr(held.module, "is_expert", False)
        if stages:
            roles["pp"][name] = stages.role(name)
        if expert:
            if plan.ep > 1:
                roles["ep"][name] = Replica(ranks=(_expert_rank(name, held, plan),))
            if plan.size("etp") > 1:
                roles["etp"][name] = _tensor_role(name, held, config)
            elif "etp" in plan.executed_axes:
                roles["etp"][name] = Replica()
        elif plan.tp > 1:
            roles["tp"][name] = _tensor_role(name, held, config)
    if plan.ep > 1 and not roles["ep"]:
        raise CapabilityError(f"ep={plan.ep}, and the model has no experts whose layers say so; set ep=1, or num_moe_experts")
    units = ("decoder.layers.*",)
    return tuple(
        ModelLayout(axis=axis, modules=_by_pattern(on_axis), units=units if i == 0 else ())
        for i, (axis, on_axis) in enumerate((axis, on_axis) for axis, on_axis in roles.items() if on_axis)
    )


def _held(whole: nn.Module) -> dict[str, Held]:
    modules = named_modules(whole)
    found = {}
    for name, parameter in logical_parameters(whole).items():
        path = name.split(".")[:-1]
        chain = [modules[".".join(path[:depth])] for depth in range(len(path), -1, -1)]
        found[name] = Held(parameter, chain[0], tuple(chain[1:]))
    return found


def _tensor_role(name: str, held: Held, config: Any) -> Role:
    parameter = held.parameter
    if getattr(parameter, "tensor_model_parallel", False):
        dim = getattr(parameter, "partition_dim", 0)
        return _cut(held, max(dim, 0), config)
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise CapabilityError(
            f"{name} asks Megatron to average its gradient over tp, whatever the ranks computed; that is neither a sum nor a copy: "
            "declare it in a layout plugin of your own, or set tp=1"
        )
    if getattr(parameter, "sequence_parallel", False) or _on_own_heads(name, held):
        return Replica("partial")
    return Replica("complete")


def _cut(held: Held, dim: int, config: Any) -> Shard:
    """How a parallel layer's weight is cut: by query groups, and each part of a fused matrix by itself."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.mlp import MLP

    parent = held.around[0] if held.around else None
    extent = held.parameter.shape[dim]
    sizes = getattr(held.parameter, "partition_sizes", None)
    if sizes is not None and sum(sizes) == extent:
        return Shard(dim, parts=tuple(sizes))
    if isinstance(parent, MLP) and held.module is parent.linear_fc1 and config.gated_linear_unit:
        return Shard(dim, parts=(extent // 2, extent // 2))
    groups = getattr(config, "num_query_groups", None)
    if isinstance(parent, Attention) and groups and extent % groups == 0:
        return Shard(dim, unit=extent // groups, unit_name="query group")
    return Shard(dim)


def _on_own_heads(name: str, held: Held) -> bool:
    """Whether a replica works on activations that are split over tp: it stands between a column- and a row-parallel layer.

    Megatron notes nothing on such a parameter, and sums only those of certain names.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    if isinstance(held.module, (ColumnParallelLinear, RowParallelLinear)):
        return False
    for module in (held.module, *held.around):
        if isinstance(module, MultiLatentAttention):
            raise CapabilityError(
                f"{name}: whether a norm of latent attention sees split activations depends on where it stands, and nothing says it; "
                "not supported with tp above 1: set tp=1"
            )
        children = list(module.children())
        split = any(isinstance(child, ColumnParallelLinear) and not child.gather_output for child in children)
        if split and any(isinstance(child, RowParallelLinear) and child.input_is_parallel for child in children):
            return True
    return False


def _expert_rank(name: str, held: Held, plan: ParallelPlan) -> int:
    experts = next((m for m in (held.module, *held.around) if getattr(m, "local_experts", None) is not None), None)
    if experts is None:
        raise CapabilityError(f"{name} holds several experts in one tensor, which is not cut over ep here; use moe_grouped_gemm=False")
    number = int(name.split(".local_experts.")[1].split(".", maxsplit=1)[0])
    total = len(experts.local_experts)
    if total % plan.ep:
        raise CapabilityError(f"{total} experts are not divided by ep={plan.ep}; choose ep from the divisors of {total}")
    return number // (total // plan.ep)


class _Stages:
    """Which stages of a pipeline hold a parameter: Megatron's own rule, asked for each stage."""

    def __init__(self, whole: Any, config: Any, plan: ParallelPlan) -> None:
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        if getattr(config, "mtp_num_layers", None):
            raise CapabilityError("multi-token prediction across a pipeline is not supported here; set pp=1, or mtp_num_layers=None")
        self._last = plan.pp - 1
        self._tied = id(whole.embedding.word_embeddings.weight) if whole.share_embeddings_and_output_weights else 0
        self._parameters = logical_parameters(whole)
        self._first_stage = {id(parameter) for parameter in whole.embedding.parameters()}
        self._layers: dict[int, int] = {}
        try:
            for stage in range(plan.pp):
                offset = get_transformer_layer_offset(config, vp_stage=None, pp_rank=stage)
                for layer in range(get_num_layers_to_build(config, vp_stage=None, pp_rank=stage)):
                    self._layers[offset + layer] = stage
        except (AssertionError, ValueError) as error:
            raise CapabilityError(f"Megatron-Core refuses pp={plan.pp} for {config.num_layers} layers: {error}") from error
        self._of_layer = {
            id(parameter): self._layers[int(number)]
            for number, layer in whole.decoder.layers.named_children()
            for parameter in layer.parameters()
        }

    def role(self, name: str) -> Role:
        key = id(self._parameters[name])
        if key == self._tied:
            return Replica("partial", ranks=(0, self._last))
        if key in self._first_stage:
            return Replica(ranks=(0,))
        return Replica(ranks=(self._of_layer.get(key, self._last),))


def _by_pattern(roles: Mapping[str, Role]) -> dict[str, ModuleLayout]:
    """Few patterns for many names: numbers that all take a role become `*`, others are listed."""
    spread: dict[str, list[set[str]]] = {}
    by_role: dict[tuple[str, Role], list[str]] = {}
    for name, role in roles.items():
        kind, numbers = _kind(name)
        _spread(spread.setdefault(kind, [set() for _ in numbers]), numbers)
        by_role.setdefault((kind, role), []).append(name)
    modules: dict[str, dict[str, Role]] = {}
    for (kind, role), names in by_role.items():
        values: list[set[str]] = [set() for _ in spread[kind]]
        for name in names:
            _spread(values, _kind(name)[1])
        if math.prod(map(len, values)) == len(names):  # the numbers combine freely
            names = [_pattern(kind, values, spread[kind])]  # noqa: PLW2901
        for name in names:
            module, _, local = name.rpartition(".")
            modules.setdefault(module, {})[local] = role
    return {module: ModuleLayout(parameters=parameters) for module, parameters in modules.items()}


def _spread(values: list[set[str]], numbers: tuple[str, ...]) -> None:
    for known, number in zip(values, numbers, strict=True):
        known.add(number)


def _pattern(kind: str, values: list[set[str]], every: list[set[str]]) -> str:
    for known, total in zip(values, every, strict=True):
        listed = sorted(known, key=int)
        kind = kind.replace("#", "*" if known == total else listed[0] if len(listed) == 1 else "{" + ",".join(listed) + "}", 1)
    return kind


def _kind(name: str) -> tuple[str, tuple[str, ...]]:
    segments = name.split(".")
    return ".".join("#" if s.isdigit() else s for s in segments), tuple(s for s in segments if s.isdigit())

"""The executor of pp, tp, ep and etp: builds this rank's part with Megatron's own parallel layers, and runs its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mixle_core import CapabilityError, Layouts, ParameterLayout, PluginError, Shard
from mixle_core.runtime import Mesh, logical_parameters
from mixle_megatron._upstream import set_groups, use_cpu
from mixle_megatron.groups import mesh_groups
from mixle_megatron.model import MegatronModel, build_part, configured
from mixle_megatron.pipeline import MegatronPipeline

FORWARD = "megatron.forward"
"""Owner label of the groups that activations travel over."""


def require_megatron(model: nn.Module) -> MegatronModel:
    """The model, if it is one that Megatron can build under a plan."""
    if not isinstance(model, MegatronModel):
        raise CapabilityError(
            f"backend megatron needs a MegatronModel, not {type(model).__name__}: its layers are Megatron-Core's own; "
            "build it with mixle_megatron.MegatronModel(config, provider), or choose backend torch_native"
        )
    return model


class MegatronAxes:
    """Executes all model axes of a plan at once: they share one model."""

    def shard(self, layout: ParameterLayout, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """This rank's slice on tp (of experts: etp); stages and expert ranks hold whole parameters or none."""
        for axis in ("tp", "etp"):
            role = layout.roles.get(axis)
            if isinstance(role, Shard):
                number, index = mesh.plan.size(axis), mesh.position[axis]
                pieces = tensor.split(list(role.parts), role.dim) if role.parts else (tensor,)
                tensor = torch.cat([piece.chunk(number, role.dim)[index] for piece in pieces], role.dim)
        return tensor.contiguous()

    def apply(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        """Replace the whole model by the part of this rank, with the values that the whole one has here."""
        shell = require_megatron(model)
        if mesh.device.type == "cpu":
            use_cpu()
        groups = mesh_groups(mesh, FORWARD)
        set_groups(groups)
        values = logical_parameters(shell)
        config = configured(shell.base_config, mesh.plan)
        first, last = mesh.coordinates["pp"] == 0, mesh.coordinates["pp"] == mesh.plan.pp - 1
        embedding, groups.embd = groups.embd, None  # its constructor would add up the copies of a tied embedding: they are equal here
        part = build_part(config, shell.provider, groups, first=first, last=last)
        groups.embd = embedding
        self._take_over(part, {name: value for name, value in values.items() if value.numel()}, mesh)
        shell.module, shell.groups = part, groups
        if mesh.plan.pp > 1:
            shell.pipeline = MegatronPipeline(groups, mesh)
        shell.mesh = mesh
        self._shell = shell

    def _take_over(self, part: nn.Module, values: dict[str, nn.Parameter], mesh: Mesh) -> None:
        built = logical_parameters(part)
        odd = sorted(built.keys() ^ values.keys()) or [name for name in built if built[name].shape != values[name].shape]
        if odd:
            where = "built here, and held elsewhere by the layout" if odd[0] in built else "held here by the layout, and not built"
            shapes = f" ({list(built[odd[0]].shape)} against {list(values[odd[0]].shape)})" if odd[0] in built and odd[0] in values else ""
            raise PluginError(
                f"rank {mesh.rank}: {odd[0]} is {where}{shapes} ({len(odd)} such); the provider must follow config and groups"
            )
        placed: dict[int, nn.Parameter] = {}
        for name, old in built.items():
            new = nn.Parameter(values[name].detach(), requires_grad=values[name].requires_grad)
            new.__dict__.update(old.__dict__)  # what Megatron notes on its parameters
            placed[id(old)] = new
        for module in part.modules():
            for local, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[local] = placed[id(parameter)]
            for local, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[local] = torch.zeros_like(buffer, device=mesh.device)

    def run(
        self, module: nn.Module, microbatches: Sequence[Any], forward: Callable[[nn.Module, Any], torch.Tensor], loss_scale: float
    ) -> None:
        """Megatron's schedule of one batch: 1F1B across a pipeline, one after the other without."""
        config = self._shell.config
        # it scales the loss, and what routers and further-token heads add to it inside
        before, config.grad_scale_func = config.grad_scale_func, lambda loss: loss * loss_scale
        self._shell.scheduled = True
        try:
            self._run(module, microbatches, forward)
        finally:
            config.grad_scale_func, self._shell.scheduled = before, False

    def _run(self, module: nn.Module, microbatches: Sequence[Any], forward: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        shell = self._shell
        if shell.pipeline is not None:
            assert isinstance(shell.pipeline, MegatronPipeline)
            shell.pipeline.run(shell, module, microbatches, forward)
            return

        def step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
            loss = forward(module, next(iterator))
            return loss, lambda output: (output, torch.ones((), dtype=torch.int), {})

        get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=step,
            data_iterator=iter(microbatches),
            model=[shell.module],
            num_microbatches=len(microbatches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not torch.is_grad_enabled(),
            pg_collection=shell.groups,
        )

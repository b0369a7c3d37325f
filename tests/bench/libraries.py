"""Other libraries' ways to combine data and tensor parallelism, behind the same interface."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import qwen
import torch
import torch.distributed as dist
from contenders import Job, Loop
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module


@functools.cache
def _mesh(data: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (data, tp), mesh_dim_names=("dp", "tp"))


def parallelize(model: nn.Module, tp: DeviceMesh) -> None:
    """torch's colwise and rowwise plan. One input conversion serves q, k and v, and one gate and up, as in torchtitan.

    q/k norms get `SequenceParallel` on the dim of the heads: that is how DTensor learns that their gradients are terms of a sum.
    """
    whole = Replicate()
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=whole), "lm_head": ColwiseParallel(output_layouts=whole)}
    parallelize_module(model, tp, ends)
    heads = SequenceParallel(sequence_dim=2, use_local_output=True)
    for layer in model.model.layers:
        plan = {
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            "mlp": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
            "self_attn.q_norm": heads,
            "self_attn.k_norm": heads,
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(layer, tp, plan)


def _per_layer(model: nn.Module, mesh: DeviceMesh, wrap) -> None:
    for layer in model.model.layers:
        wrap(layer, mesh=mesh)
    wrap(model, mesh=mesh)


class TorchFSDP(Loop):
    """`parallelize_module` over tp, then `fully_shard` over dp."""

    name = "torch: parallelize_module + fully_shard"
    wrap = staticmethod(fully_shard)

    def __init__(self, job: Job) -> None:
        mesh = _mesh(job.plan.data_size, job.plan.tp)
        model = qwen.build(job.size)
        parallelize(model, mesh["tp"])
        _per_layer(model, mesh["dp"], self.wrap)
        super().__init__(job, model, model, model.set_requires_gradient_sync, norm_axes="world")


class TorchReplicate(TorchFSDP):
    """The same with FSDP2's `replicate` over dp: DistributedDataParallel refuses DTensor parameters."""

    name = "torch: parallelize_module + replicate (FSDP2's)"
    wrap = staticmethod(replicate)


def write_weights(job: Job) -> Path:
    """The directory that `from_pretrained` reads, written by the first rank."""
    folder = Path(job.folder) / f"qwen3-{job.size.replace(' ', '-')}"
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        qwen.build(job.size).save_pretrained(folder)
    dist.barrier()
    return folder


class Transformers(Loop):
    """transformers' own plans for tp and FSDP2, from `from_pretrained(distributed_config=...)`."""

    name = "transformers: DistributedConfig"

    def __init__(self, job: Job) -> None:
        from transformers import Qwen3ForCausalLM
        from transformers.distributed import DistributedConfig

        folder = write_weights(job)
        config = DistributedConfig(tp_size=job.plan.tp, fsdp_size=job.plan.dp_shard, dp_replicate_size=job.plan.dp_replicate)
        model = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float32, use_cache=False).train()
        super().__init__(job, model, model, model.set_requires_gradient_sync, norm_axes="world")


class Fabric(Loop):
    """Lightning Fabric's ModelParallelStrategy around the same plan as `TorchFSDP`."""

    name = "Lightning Fabric: ModelParallelStrategy"

    def __init__(self, job: Job) -> None:
        from lightning_fabric import Fabric as LightningFabric
        from lightning_fabric.strategies import ModelParallelStrategy

        def parallelise(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            parallelize(model, mesh["tensor_parallel"])
            _per_layer(model, mesh["data_parallel"], fully_shard if job.plan.dp_shard > 1 else replicate)
            return model

        strategy = ModelParallelStrategy(parallelise, data_parallel_size=job.plan.data_size, tensor_parallel_size=job.plan.tp)
        self._fabric = LightningFabric(accelerator="cpu", devices=job.plan.world_size, strategy=strategy)
        self._fabric.launch()
        model = qwen.build(job.size)
        wrapped = self._fabric.setup(model)
        super().__init__(job, wrapped, model, model.set_requires_gradient_sync, norm_axes="world")
        self.optimizers = [self._fabric.setup_optimizers(optimizer) for optimizer in self.optimizers]

    def _backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)


class Accelerate(Loop):
    """accelerate's ParallelismConfig with FSDP2."""

    name = "accelerate: ParallelismConfig"

    def __init__(self, job: Job) -> None:
        from accelerate import Accelerator, ParallelismConfig
        from accelerate.utils import FullyShardedDataParallelPlugin

        config = ParallelismConfig(dp_replicate_size=job.plan.dp_replicate, dp_shard_size=job.plan.dp_shard, tp_size=job.plan.tp)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False) if job.plan.dp_shard > 1 else None
        Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)
        message = "accelerate started on CPU, which this suite has no loop for"
        raise NotImplementedError(message)


def launched_as(rank: int, world_size: int) -> None:
    """The variables of a launcher, which Fabric, accelerate and transformers read although the process group exists."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1"
    )

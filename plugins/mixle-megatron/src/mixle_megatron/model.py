"""`MegatronModel`: a Megatron-Core model that mixle can describe whole, build under any plan, and run in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from mixle_core import CapabilityError, MixleError, ParallelPlan, UsageError
from mixle_core.runtime import Mesh, derive_seed
from mixle_megatron._upstream import (
    NumberedModules,
    groups_in_effect,
    random_states,
    recorded_initialisers,
    redirect_recomputation,
    require_version,
    scale_inner_losses,
    seed_random_states,
    set_random_states,
    use_cpu,
)
from mixle_megatron.groups import lone_groups, solo_groups

Provider = Callable[..., nn.Module]
"""`(config, pre_process, post_process, pg_collection) -> GPTModel`: builds the part of the model that one rank holds."""


class Pipeline(Protocol):
    """What runs the stages of a model that is cut over pp."""

    running: bool

    def evaluate(self, model: MegatronModel, arguments: dict[str, Any]) -> torch.Tensor:
        """The last stage's output for one call without gradients, on every stage."""


class MegatronModel(nn.Module):
    """A Megatron-Core language model, whole and on meta until a plan is known.

    Parameters have their names in the whole model on every rank: layers and experts keep their global numbers, and an
    embedding that is tied across stages has one name.

    Args:
        config: a TransformerConfig; its parallel sizes are set from the plan.
        provider: `(config, pre_process, post_process, pg_collection) -> GPTModel`, called for each part; its modules take
            their groups from `pg_collection`.

    Raises:
        CapabilityError: no Megatron-Core that this plugin was read against, or a config that Megatron refuses.
    """

    def __init__(self, config: Any, provider: Provider) -> None:
        super().__init__()
        require_version()
        if not torch.cuda.is_available():
            use_cpu()
        self.provider = provider
        self.base_config = config
        self.groups: Any = None
        self.pipeline: Pipeline | None = None
        self.mesh: Mesh | None = None
        self.scheduled = False
        self._loss_scale = 1.0
        self._seeded = False
        self.owned: dict[str, tuple[nn.Parameter, slice | None]] = {}
        self.module = build_whole(config, provider, ParallelPlan())

    @property
    def local(self) -> Any:
        """The GPTModel of this rank, without what wraps it."""
        return unwrapped(self.module)

    @property
    def config(self) -> Any:
        """The TransformerConfig of the part that this rank holds."""
        return self.local.config

    def set_loss_scale(self, scale: float) -> None:
        """What the loss is multiplied with before backward: the losses that routers and further-token heads add inside follow."""
        self._loss_scale = scale

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.local.vocab_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Logits of shape [rows, length, vocabulary], or with `labels` the loss of each token, [rows, length]; per data rank.

        Across a pipeline, outside its schedule, every stage calls it with the same rows and without gradients, and all get
        the result.

        Args:
            input_ids: [rows, length].
            attention_mask: True where a position may not look; None for a causal mask.
        """
        config = self.config
        if config.sequence_parallel and input_ids.shape[1] % config.tensor_model_parallel_size:
            raise UsageError(
                f"rows of {input_ids.shape[1]} positions; with sequence_parallel expected a multiple of tp="
                f"{config.tensor_model_parallel_size}"
            )
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        arguments = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask, "labels": labels, **options}
        if self.pipeline is not None and not self.pipeline.running:
            if torch.is_grad_enabled():
                raise UsageError("a pipeline's stages train together: through a session, or through reduction.run(microbatches, loss)")
            return self.pipeline.evaluate(self, arguments)
        self._seed_random_states()
        if not self.scheduled and torch.is_grad_enabled():  # a schedule does it itself
            scale_inner_losses(self._loss_scale)
        if self.groups is None:
            # a whole model that runs by itself: its parallel layers ask Megatron's global state for groups of one rank
            self.groups = solo_groups("megatron.alone")
        with groups_in_effect(self.groups):
            output: torch.Tensor = self.module(**arguments, runtime_gather_output=labels is None)
        return output

    def generator_states(self) -> dict[str, torch.Tensor]:
        """Megatron's named random states, as they stand; none before the first forward."""
        return random_states() if self._seeded else {}

    def set_generator_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Go on from `states`; without any, seed them anew at the next forward."""
        self._seeded = bool(states)
        if states:
            set_random_states(states)

    def _seed_random_states(self) -> None:
        """Seed what ranks of tp, or of the experts, draw differently, from the seed that ranks with the same rows share."""
        if self._seeded:
            return
        self._seeded = True
        at = self.mesh.position if self.mesh else {}
        base = torch.initial_seed()
        seed_random_states(
            {
                "model-parallel-rng": derive_seed(base, "tp", at.get("tp", 0)),
                "expert-parallel-rng": derive_seed(base, "experts", at.get("etp", 0), at.get("ep", 0)),
                "data-parallel-rng": derive_seed(base, "data"),
            }
        )


_NOT_CUT: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Of a model whose layers are all on one stage."""


def unwrapped(module: Any) -> Any:
    """The model inside Megatron's wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def configured(config: Any, plan: ParallelPlan) -> Any:
    """A copy of `config` with the sizes of `plan`, checked by Megatron.

    Raises:
        CapabilityError: Megatron refuses the combination; with its reason.
    """
    etp = plan.size("etp")
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": etp,
        "sequence_parallel": plan.sequence_parallel,
        "calculate_per_token_loss": True,  # sums over data ranks instead of means: the session divides once, by all tokens
        "use_cpu_initialization": True,  # weights are filled from the seed and their names, not by the constructors
    }
    if plan.pp == 1:
        sizes |= _NOT_CUT
    else:
        sizes |= {"pipeline_dtype": config.params_dtype, "variable_seq_lengths": True}
        if not config.num_moe_experts:
            sizes["moe_token_dispatcher_type"] = "alltoall"  # noqa: S105 - asked for beside variable lengths, without experts too
        if not torch.cuda.is_available():
            sizes["deallocate_pipeline_outputs"] = False
    unknown = [name for name in sizes if not hasattr(config, name)]
    if unknown:
        raise CapabilityError(f"{type(config).__name__} has no {unknown[0]}; expected a TransformerConfig of megatron-core 0.16")
    if getattr(config, "virtual_pipeline_model_parallel_size", None):
        raise CapabilityError("virtual_pipeline_model_parallel_size is set, and interleaved schedules are not driven here; leave it None")
    try:
        return dataclasses.replace(config, **sizes)
    except (AssertionError, ValueError) as error:
        raise CapabilityError(f"Megatron-Core refuses {plan.describe()} for this config: {error}") from error


def build_part(config: Any, provider: Provider, groups: Any, *, first: bool, last: bool) -> Any:
    """Build what one rank holds, on meta, under its names in the whole model.

    Raises:
        CapabilityError: Megatron refuses to build it; with its reason.
    """
    # some modules take no groups as arguments, and ask the global state; some take them only once torch.distributed runs
    with torch.device("meta"), recorded_initialisers(config), groups_in_effect(groups):
        try:
            part: Any = provider(config=config, pre_process=first, post_process=last, pg_collection=groups)
        except MixleError:
            raise
        except Exception as error:  # Megatron's assertions, and the provider's own errors
            sizes = {
                "tp": config.tensor_model_parallel_size,
                "pp": config.pipeline_model_parallel_size,
                "cp": config.context_parallel_size,
                "ep": config.expert_model_parallel_size,
            }
            plan = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one process"
            raise CapabilityError(
                f"Megatron-Core refuses to build this model under {plan}: {error or type(error).__name__}; change the plan or the config"
            ) from error
    module: Any
    for module in part.modules():
        if getattr(module, "tp_group", groups) is None:
            module.tp_group = groups.expt_tp if getattr(module, "is_expert", False) else groups.tp
        module.mixle_inits = {
            name: parameter.mixle_init for name, parameter in module.named_parameters(recurse=False) if hasattr(parameter, "mixle_init")
        }
    _with_global_names(part)
    for layer in part.decoder.layers:
        redirect_recomputation(layer)
    return part


def build_whole(config: Any, provider: Provider, plan: ParallelPlan) -> Any:
    """Build the whole model on meta, its parameters marked as under `plan`, with global shapes.

    Every group has one rank, so nothing is cut; what Megatron notes on parameters follows the config.
    """
    marked = configured(config, plan)
    for name, value in _NOT_CUT.items():
        setattr(marked, name, value)
    return build_part(marked, provider, lone_groups(), first=True, last=True)


def _with_global_names(part: Any) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_block import TransformerBlock

    for module in list(part.modules()):
        if isinstance(module, TransformerBlock):
            module.layers = NumberedModules({layer.layer_number - 1: layer for layer in module.layers})
        experts: Any = getattr(module, "experts", None)
        if isinstance(module, MoELayer) and isinstance(getattr(experts, "local_experts", None), nn.ModuleList):
            experts.local_experts = NumberedModules(dict(zip(module.local_expert_indices, experts.local_experts, strict=True)))
    tied = getattr(part, "share_embeddings_and_output_weights", False)
    if tied and part.post_process and not part.pre_process and not hasattr(part, "embedding"):
        # the copy of the first stage's embedding has that one's name, and only that one
        embedding, words = nn.Module(), nn.Module()
        words.weight = part.output_layer.weight
        embedding.word_embeddings = words
        part._modules = {"embedding": embedding, **part._modules}

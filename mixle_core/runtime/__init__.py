"""The front door for everything that needs torch: plugins and training loops import from here."""

from __future__ import annotations

from mixle_core.runtime.arbitration import explain
from mixle_core.runtime.attaching import attach
from mixle_core.runtime.backends import TrainingBackend, get_training_backend
from mixle_core.runtime.contracts import AxisExecutor, Loss, Observe, Owner
from mixle_core.runtime.gradients import Reduced, reduce_coalesced
from mixle_core.runtime.groups import Mesh, Traffic, counted_traffic, launch_command, reduce_scatter, solo_group
from mixle_core.runtime.initialise import derive_seed, logical_parameters, named_modules
from mixle_core.runtime.models import forward_names, model_builder, vocabulary_size
from mixle_core.runtime.reduction import Reduction
from mixle_core.runtime.saving import Loaded, SaveHandle, load_hf_weights, load_training_state, newest_step, save_training_state
from mixle_core.runtime.session import Session, batch_digest, prepare
from mixle_core.runtime.state import Block, FlatBlock, StateEntry, StateReader, blocks_of, flat_blocks, load_state, save_state
from mixle_core.runtime.usage import Usage

__all__ = [
    "save_state",
    "save_training_state",
    "load_hf_weights",
    "load_training_state",
    "newest_step",
    "SaveHandle",
    "Loaded",
    "load_state",
    "flat_blocks",
    "blocks_of",
    "StateReader",
    "StateEntry",
    "FlatBlock",
    "Block",
    "AxisExecutor",
    "Loss",
    "Mesh",
    "Observe",
    "Owner",
    "Reduced",
    "Reduction",
    "Session",
    "TrainingBackend",
    "Traffic",
    "Usage",
    "attach",
    "batch_digest",
    "counted_traffic",
    "derive_seed",
    "explain",
    "forward_names",
    "get_training_backend",
    "launch_command",
    "logical_parameters",
    "model_builder",
    "named_modules",
    "prepare",
    "reduce_coalesced",
    "reduce_scatter",
    "solo_group",
    "vocabulary_size",
]

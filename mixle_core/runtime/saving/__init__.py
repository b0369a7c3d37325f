"""Saving and loading the state of a training, over all its ranks."""

from __future__ import annotations

from mixle_core.runtime.saving.hf import load_hf_weights
from mixle_core.runtime.saving.loading import newest_step
from mixle_core.runtime.saving.state import Loaded, load_training_state, save_training_state
from mixle_core.runtime.saving.writing import SaveHandle

__all__ = ["Loaded", "SaveHandle", "load_hf_weights", "load_training_state", "newest_step", "save_training_state"]

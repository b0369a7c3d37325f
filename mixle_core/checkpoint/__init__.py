"""Files of a checkpoint: written whole or not at all, read with every byte checked, and never run. No ranks, no plugins."""

from mixle_core.checkpoint.catalogue import Step, clean, latest, prune, steps, survey
from mixle_core.checkpoint.commit import begin, commit, discard
from mixle_core.checkpoint.dcp import Imported, import_dcp
from mixle_core.checkpoint.errors import CheckpointError
from mixle_core.checkpoint.files import data_file
from mixle_core.checkpoint.hf import Exported, export_hf
from mixle_core.checkpoint.hf_files import HfWeights
from mixle_core.checkpoint.manifest import Chunk, Metadata, Stored, Success
from mixle_core.checkpoint.reader import Checkpoint, open_checkpoint
from mixle_core.checkpoint.shards import Piece, Record, opaque, write_data

__all__ = [
    "begin", "write_data", "commit", "discard", "data_file", "Piece", "Record", "opaque",
    "open_checkpoint", "Checkpoint", "Success", "Metadata", "Stored", "Chunk",
    "steps", "latest", "survey", "Step", "prune", "clean",
    "import_dcp", "Imported", "export_hf", "Exported", "HfWeights",
    "CheckpointError",
]  # fmt: skip

"""Checkpoints that load under any layout: safetensors files and a checked manifest, no pickle.

Folders of torch.distributed.checkpoint are read and written too: see `dcp`.
"""

from ms_parallel.checkpoint.dcp import (
    RunPosition,
    is_distributed,
    load_distributed,
    save_distributed,
)
from ms_parallel.checkpoint.folder import (
    all_steps,
    complete_steps,
    keep_last,
    note_last,
    set_aside,
    step_folder,
    sweep,
    was_begun,
)
from ms_parallel.checkpoint.manifest import Manifest, read_manifest
from ms_parallel.checkpoint.state import load, save
from ms_parallel.checkpoint_store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "Manifest",
    "RunPosition",
    "all_steps",
    "complete_steps",
    "is_distributed",
    "keep_last",
    "load",
    "load_distributed",
    "note_last",
    "read_manifest",
    "save",
    "save_distributed",
    "set_aside",
    "step_folder",
    "sweep",
    "was_begun",
]

"""Checkpoints that load under any layout: safetensors files and a checked manifest, no pickle."""

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

__all__ = [
    "Manifest",
    "all_steps",
    "complete_steps",
    "keep_last",
    "load",
    "note_last",
    "read_manifest",
    "save",
    "set_aside",
    "step_folder",
    "sweep",
    "was_begun",
]

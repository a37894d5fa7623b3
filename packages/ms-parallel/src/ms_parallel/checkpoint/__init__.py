"""Checkpoints that load under any layout: safetensors files, a checked manifest, no pickles."""

from ms_parallel.checkpoint.folder import complete_steps, keep_last, set_aside, step_folder, sweep
from ms_parallel.checkpoint.manifest import Manifest, read_manifest
from ms_parallel.checkpoint.state import load, save

__all__ = [
    "Manifest",
    "complete_steps",
    "keep_last",
    "load",
    "read_manifest",
    "save",
    "set_aside",
    "step_folder",
    "sweep",
]

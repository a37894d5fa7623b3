"""A test device other than the CPU, which reveals tensors on the wrong device.

`rig` is a PrivateUse1 device of torch in the host's memory. A process started with `environment()`
has eight such devices, `torch.accelerator` returns them, and `rigccl` exchanges only their tensors.
Mixing them with CPU tensors raises the same errors as CUDA.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from ms_rig.build import extension

__all__ = ["environment", "load", "run_command_on_rig", "run_on_rig"]

EXTENSION = "MS_RIG_EXTENSION"
HERE = Path(__file__).parent
PROCESSES = HERE.parents[2] / "shared_source/tests/processes.py"


def environment() -> dict[str, str]:
    """Variables that give a process the device `rig` once it imports torch; builds it first.

    Skips the calling test, with the reason, if the extension cannot be built here.
    """
    entries = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    paths = [str(HERE.parent), *(path for path in entries if path != str(HERE.parent))]
    return {EXTENSION: str(extension()), "PYTHONPATH": os.pathsep.join(paths)}


def run_on_rig(
    count: int, file: str | Path, function: str, *, timeout_s: float = 120.0, **arguments: Any
) -> list[Any]:
    """Call `function(**arguments)` of `file` in `count` processes with one device each.

    Arguments and results travel as JSON; a process that fails is an `AssertionError` with its log.
    """
    return list(_processes().run_processes(count, file, function, timeout_s=timeout_s, **arguments))


def run_command_on_rig(
    words: Sequence[str], *, variables: Mapping[str, str], **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run what `python WORDS` runs in a process that has the device; under torchrun, in each."""
    done: subprocess.CompletedProcess[str] = _processes().run_command(
        words, environment={**variables, **environment()}, **options
    )
    return done


@cache
def _processes() -> ModuleType:
    """The tests' way to start processes, once more: its nursery has the device."""
    spec = spec_from_file_location("ms_rig_processes", PROCESSES)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    variables: Mapping[str, str] = environment()
    with (
        patch.dict(os.environ, variables),
        patch.object(sys, "path", [str(HERE.parent), *sys.path]),
    ):
        module._nursery()
    return module


def load() -> None:
    """Give this process the device, if it was started to have it; torch calls this (autoload)."""
    if EXTENSION in os.environ:
        from ms_rig.device import register

        register(os.environ[EXTENSION])

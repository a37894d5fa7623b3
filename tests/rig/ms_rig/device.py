"""Makes the extension known to torch: the device `rig`, its module, and the backend `rigccl`."""

import sys
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch

__all__ = ["register"]


def register(path: str) -> None:
    """Load the built extension at `path` and name its device and its backend."""
    torch.utils.rename_privateuse1_backend("rig")
    extension = _imported(path)
    from ms_rig import torch_rig

    torch._register_device_module("rig", torch_rig)
    torch.utils.generate_methods_for_privateuse1_backend()

    def group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        inner = torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)
        inner._set_sequence_number_for_group()
        return extension.Group(inner)

    torch.distributed.Backend.register_backend("rigccl", group, devices=["rig"])


def _imported(path: str) -> ModuleType:
    spec = spec_from_file_location("ms_rig_extension", path)
    assert spec is not None
    assert spec.loader is not None
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[spec.name] = extension
    return extension

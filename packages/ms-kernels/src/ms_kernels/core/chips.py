"""Chip names of devices, as used by tuning tables and libraries."""

import re
from functools import cache
from typing import Any

import torch

from ms_kernels.core.tracing import known_when_traced


@known_when_traced
def chip_of(device: torch.device) -> str:
    """Return the chip name of a device: ``cpu-avx512``, ``sm_90``, ``gfx942``, ...

    Falls back to the device type if the device is not available or its vendor is unknown.
    """
    return _chip_of(device.type, device.index)


@cache
def _chip_of(device_type: str, index: int | None) -> str:
    if device_type == "cpu":
        return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    module: Any = getattr(torch, device_type, None)
    if module is None or not getattr(module, "is_available", lambda: False)():
        return device_type
    if device_type == "cuda":
        properties = module.get_device_properties(index)
        if torch.version.hip:
            return str(properties.gcnArchName).partition(":")[0]
        return f"sm_{properties.major}{properties.minor}"
    if hasattr(module, "get_device_name"):
        name = re.sub(r"[^a-z0-9_.-]+", "-", str(module.get_device_name(index)).lower())
        return name.strip("-") or device_type
    return device_type

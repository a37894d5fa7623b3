"""The name of the chip that a device is, as tuning tables and libraries are named."""

import re
from functools import cache
from typing import Any

import torch

from ms_kernels.core.tracing import known_when_traced


@known_when_traced
def chip_of(device: torch.device) -> str:
    """Return the name of the chip that `device` is: ``cpu-avx512``, ``sm_90``, ``gfx942``, ...

    A device that is not here, or whose vendor is not known, has the name of its type.
    """
    return _chip_of(device.type, device.index)


@cache
def _chip_of(kind: str, index: int | None) -> str:
    if kind == "cpu":
        return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    module: Any = getattr(torch, kind, None)
    if module is None or not getattr(module, "is_available", lambda: False)():
        return kind
    if kind == "cuda":
        properties = module.get_device_properties(index)
        if torch.version.hip:
            return str(properties.gcnArchName).partition(":")[0]
        return f"sm_{properties.major}{properties.minor}"
    if hasattr(module, "get_device_name"):
        name = re.sub(r"[^a-z0-9_.-]+", "-", str(module.get_device_name(index)).lower())
        return name.strip("-") or kind
    return kind

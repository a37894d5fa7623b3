"""Tables of versions and adapters, with sources, in `tables.json` in this folder."""

from functools import cache
from pathlib import Path

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.untrusted import read_json


class CudaDriver(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA driver for Linux of a CUDA toolkit."""

    cuda: str
    driver: str
    """Driver released with the toolkit."""


class TorchNpu(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that a torch_npu release is for."""

    torch_npu: str
    torch: str
    cann: str


class AscendDriver(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest driver for a CANN version and later ones."""

    cann: str
    driver: str


class ReferenceTables(msgspec.Struct, frozen=True, kw_only=True):
    """All reference tables."""

    sources: dict[str, str]
    """Source and date of each table."""
    cuda_major_drivers: dict[str, str]
    """Oldest driver by major version of CUDA, with minor version compatibility."""
    cuda_drivers: list[CudaDriver]
    torch_npu: list[TorchNpu]
    ascend_drivers: list[AscendDriver]
    adapters_gbit_per_s: dict[str, float]
    """Maximum rate of a port by type of adapter, in 10⁹ bits per second."""


@cache
def tables() -> ReferenceTables:
    """Read `tables.json` once."""
    return read_json(Path(__file__).with_name("tables.json"), ReferenceTables, error=ConfigError)

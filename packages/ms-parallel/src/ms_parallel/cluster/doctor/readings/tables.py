"""The tables of versions and adapters, each with its source, in `tables.json` beside this file."""

from functools import cache
from pathlib import Path

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.untrusted import read_json


class CudaDriver(msgspec.Struct, frozen=True, kw_only=True):
    """What a CUDA toolkit asks of NVIDIA's driver for Linux."""

    cuda: str
    driver: str
    """The driver that the toolkit was released with."""


class TorchNpu(msgspec.Struct, frozen=True, kw_only=True):
    """What a release of torch_npu goes with."""

    torch_npu: str
    torch: str
    cann: str


class AscendDriver(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest driver that a CANN, and those after it, were released for."""

    cann: str
    driver: str


class ReferenceTables(msgspec.Struct, frozen=True, kw_only=True):
    """All tables."""

    sources: dict[str, str]
    """Where each table was read, and when."""
    cuda_major_drivers: dict[str, str]
    """Oldest driver by the major version of CUDA; a toolkit runs on it with fewer functions."""
    cuda_drivers: list[CudaDriver]
    torch_npu: list[TorchNpu]
    ascend_drivers: list[AscendDriver]
    adapters_gbit_per_s: dict[str, float]
    """Most of a port by the type of the adapter, in 10⁹ bits a second."""


@cache
def tables() -> ReferenceTables:
    """Read the reference tables, once."""
    return read_json(Path(__file__).with_name("tables.json"), ReferenceTables, error=ConfigError)

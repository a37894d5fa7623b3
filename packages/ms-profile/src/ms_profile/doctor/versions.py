"""Versions as comparable values, and the tables of versions and adapters in `tables.json`."""

import re
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import read_json

PRERELEASE: Final = re.compile(r"\.?(?:rc|alpha|beta)\.?(\d{0,9})", re.IGNORECASE)
PARTS: Final = 6
MAX_DIGITS: Final = 20


def parse_int(text: str | None) -> int | None:
    """Parse a nonnegative integer; None if the text is not one, or is implausibly long."""
    text = (text or "").strip()
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if is_number else None


def version(text: str) -> tuple[int, ...]:
    """Parse a version for comparison; prereleases (`8.0.RC2`) come before their release.

    Args:
        text: version such as `580.65.06`, `2.13.0+cu130` or `8.3.RC1`.
    """
    base = text.split("+")[0]
    prerelease = PRERELEASE.search(base)
    numbers = re.findall(r"\d{1,9}", base[: prerelease.start()] if prerelease else base)
    padded = [*map(int, numbers[:PARTS]), *[0] * (PARTS - len(numbers))]
    # -1 sorts a prerelease before its release, and its number orders prereleases.
    return (*padded, -1 if prerelease else 0, int(prerelease[1] or 0) if prerelease else 0)


def release(text: str) -> str:
    """First three numbers of a version, such as `2.13.0` for `2.13.0.post3+cpu`."""
    return ".".join(re.findall(r"\d{1,9}", text.split("+")[0])[:3])


class CudaDriver(msgspec.Struct, frozen=True, kw_only=True):
    """NVIDIA driver for Linux of a CUDA toolkit."""

    cuda: str
    driver: str
    """Driver released with the toolkit."""


class TorchNpu(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of torch and CANN that a torch_npu release needs."""

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
    return read_json(Path(__file__).with_name("tables.json"), ReferenceTables, error=FormatError)

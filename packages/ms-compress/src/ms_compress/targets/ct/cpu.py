"""Detect CPUs on which vLLM computes 8-bit inputs of compressed-tensors incorrectly."""

import logging
import platform
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

CPUINFO = Path("/proc/cpuinfo")
VNNI = {"avx512_vnni", "avx_vnni"}


def lacks_vnni() -> bool:
    """Return whether this machine has an x86 CPU without VNNI; False if unknown.

    Without VNNI, pairs of int8 products are summed in 16 bits, which saturate.
    """
    if platform.machine() != "x86_64":
        return False
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return bool(flags) and not VNNI & set(flags)


@cache
def warn_without_vnni() -> None:
    """Warn once if vLLM would compute folders with 8-bit inputs incorrectly on this CPU."""
    if lacks_vnni():
        logger.warning(
            "vLLM computes 8-bit inputs incorrectly on CPUs without AVX512-VNNI or AVX-VNNI, such"
            " as this one; serve the folder with transformers, or on another CPU or a GPU"
        )

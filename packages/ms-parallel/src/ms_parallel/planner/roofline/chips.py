"""Known chips: memory, peak rates and links, each number with its source.

Rates are peaks without structured sparsity, and links count one direction: vendors' sheets often
print twice as much of either. Huawei has no public data sheet of the Ascend 910B and 910C; their
numbers come from its papers, server documents and modelling tool, as each source says, and
`by_vendor` is false where it is not the vendor's own.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest

DTYPES = ("float32", "tf32", "float16", "bfloat16", "float8")
"""Kinds of matrix products, by what they multiply; what is added up is wider."""


def _table(rates: Mapping[str, float]) -> Mapping[str, float]:
    unknown = next((name for name in rates if name not in DTYPES), None)
    if unknown is not None:
        raise ConfigError(f"dtype {unknown!r} of a chip is not known; {nearest(unknown, DTYPES)}")
    return MappingProxyType(dict(rates))


@frozen(kw_only=True)
class Chip:
    """One device of a kind as a process sees it: of an Ascend 910C, one of its two dies."""

    name: str
    memory_gib: float
    """What the driver reports as its whole memory."""
    memory_gb_per_s: float
    """Peak bandwidth of that memory, in 10^9 bytes a second."""
    peak_tflops: Mapping[str, float] = field(converter=_table)
    """Peak of dense matrix products in 10^12 operations a second, by the name of `DTYPES`."""
    link_gb_per_s: float
    """To the other devices of its node, all links together, one direction, in 10^9 bytes."""
    node_devices: int = 8
    """Devices of the usual node."""
    mesh: bool = False
    """Whether these are joined pair by pair, without a switch: fewer have fewer links."""
    source: str
    """Where the numbers stand."""
    by_vendor: bool = True
    """Whether its maker publishes them."""

    def peak(self, dtype: str) -> float:
        """Return the operations a second of dense matrix products.

        Raises:
            ConfigError: the chip has no such products.
        """
        if dtype not in self.peak_tflops:
            names = ", ".join(self.peak_tflops)
            raise ConfigError(f"{self.name} multiplies no {dtype} matrices; choose among {names}")
        return self.peak_tflops[dtype] * 1e12


def _half(rate: float, **further: float) -> dict[str, float]:
    """Return the rates of a chip that multiplies both half precisions equally fast."""
    return {"float16": rate, "bfloat16": rate, **further}


_HOPPER = _half(989.4, float8=1978.9, tf32=494.7, float32=66.9)
_ATLAS_A2 = (
    "Huawei Atlas 800T A2 white paper (313 or 376 TFLOP/s FP16 a processor, 64 GB, eight of them); "
    "1.6 TB/s and HCCS full mesh of 7 x 56 GB/s, both directions: Atlas 800I/800T A2 product pages"
)
_KNOWN = (
    Chip(
        name="ascend-910b1",
        memory_gib=64,
        memory_gb_per_s=1600,
        peak_tflops=_half(414),
        link_gb_per_s=196,
        mesh=True,
        source="414 TFLOP/s: resellers' tables only; the rest as ascend-910b2",
        by_vendor=False,
    ),
    Chip(
        name="ascend-910b2",
        memory_gib=64,
        memory_gb_per_s=1600,
        peak_tflops=_half(376, float32=94),
        link_gb_per_s=196,
        mesh=True,
        source=_ATLAS_A2,
    ),
    Chip(
        name="ascend-910b3",
        memory_gib=64,
        memory_gb_per_s=1600,
        peak_tflops=_half(313, float32=78.3),
        link_gb_per_s=196,
        mesh=True,
        source=_ATLAS_A2,
    ),
    Chip(
        name="ascend-910b4",
        memory_gib=32,
        memory_gb_per_s=800,
        peak_tflops=_half(280, float32=75),
        link_gb_per_s=196,
        mesh=True,
        source="Huawei Atlas 800I A2 product page, 32 GB variant with HCCS",
    ),
    Chip(
        name="ascend-910c",
        memory_gib=64,
        memory_gb_per_s=1600,
        peak_tflops=_half(376),
        link_gb_per_s=196,
        node_devices=16,
        source=(
            "Zuo et al. 2025, Serving Large Language Models on Huawei CloudMatrix384 (Huawei), "
            "section 3: two dies of 376 TFLOP/s, 64 GB, 1.6 TB/s and 196 GB/s one way; "
            "Huawei Connect 2025 says 800 TFLOP/s, 128 GB, 3.2 TB/s, 784 GB/s of both dies"
        ),
    ),
    Chip(
        name="v100-32",
        memory_gib=32,
        memory_gb_per_s=900,
        peak_tflops={"float16": 125, "float32": 15.7},
        link_gb_per_s=150,
        source="NVIDIA V100 data sheet, January 2020, SXM2: 300 GB/s NVLink of both directions",
    ),
    Chip(
        name="a100-40",
        memory_gib=40,
        memory_gb_per_s=1555,
        peak_tflops=_half(312, tf32=156, float32=19.5),
        link_gb_per_s=300,
        source="NVIDIA A100 data sheet, 2020, SXM 40 GB: 600 GB/s NVLink of both directions",
    ),
    Chip(
        name="a100-80",
        memory_gib=80,
        memory_gb_per_s=2039,
        peak_tflops=_half(312, tf32=156, float32=19.5),
        link_gb_per_s=300,
        source="NVIDIA A100 data sheet, June 2021, SXM 80 GB",
    ),
    Chip(
        name="h100-sxm",
        memory_gib=79.6,
        memory_gb_per_s=3350,
        peak_tflops=_HOPPER,
        link_gb_per_s=450,
        source="NVIDIA H100 Architecture whitepaper, table of SXM5 without sparsity; 81559 MiB",
    ),
    Chip(
        name="h100-pcie",
        memory_gib=79.6,
        memory_gb_per_s=2039,
        peak_tflops=_half(756, float8=1513, tf32=378, float32=51.2),
        link_gb_per_s=64,
        source="NVIDIA H100 PCIe product brief: PCIe 5.0 x16; a bridge joins pairs, not counted",
    ),
    Chip(
        name="h800-sxm",
        memory_gib=79.6,
        memory_gb_per_s=3350,
        peak_tflops=_HOPPER,
        link_gb_per_s=200,
        source="DeepSeek-AI 2025, Insights into DeepSeek-V3: H100 with NVLink cut to 400 GB/s",
        by_vendor=False,
    ),
    Chip(
        name="h200",
        memory_gib=140.4,
        memory_gb_per_s=4800,
        peak_tflops=_HOPPER,
        link_gb_per_s=450,
        source="NVIDIA H200 data sheet, SXM, half of the rates with sparsity; 143771 MiB",
    ),
    Chip(
        name="b200",
        memory_gib=179.1,
        memory_gb_per_s=8000,
        peak_tflops=_half(2250, float8=4500, tf32=1125, float32=75),
        link_gb_per_s=900,
        source="NVIDIA DGX B200 data sheet, an eighth, half of rates with sparsity; 183359 MiB",
    ),
    Chip(
        name="mi300x",
        memory_gib=192,
        memory_gb_per_s=5300,
        peak_tflops=_half(1307.4, float8=2614.9, tf32=653.7, float32=163.4),
        link_gb_per_s=448,
        mesh=True,
        source="AMD Instinct MI300X data sheet: seven Infinity Fabric links of 128 GB/s both ways",
    ),
)
CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in _KNOWN})
"""All known chips by name."""


USUAL: Mapping[str, str] = MappingProxyType(
    {
        "910b": "ascend-910b2",
        "910c": "ascend-910c",
        "ascend-910b": "ascend-910b2",
        "v100": "v100-32",
        "a100": "a100-80",
        "h100": "h100-sxm",
        "h800": "h800-sxm",
    }
)
"""The chip that is mostly meant by a shorter name."""


def chip_named(name: str) -> Chip:
    """Find a known chip by its name.

    Args:
        name: in any case, with spaces or hyphens; `H100` is the SXM module, as `USUAL` says.

    Raises:
        ConfigError: none has this name.
    """
    plain = name.lower().replace(" ", "-").replace("_", "-")
    found = CHIPS.get(USUAL.get(plain, plain))
    if found is None:
        raise ConfigError(f"chip {name!r} is not known; {nearest(plain, [*CHIPS, *USUAL])}")
    return found

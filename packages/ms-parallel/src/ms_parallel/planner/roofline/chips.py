"""Known chips: memory, peak rates and links, with sources.

Peak rates are without structured sparsity, and link bandwidths are in one direction; data sheets
often print twice these values. Huawei has no public data sheet for the Ascend 910B and 910C;
their numbers come from its papers, server documents and modeling tool, as given in `source`.
`by_vendor` is false if the source is not the vendor.
"""

from collections.abc import Mapping
from types import MappingProxyType

from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest

DTYPES = ("float32", "tf32", "float16", "bfloat16", "float8")
"""Input dtypes of matrix products; accumulation has higher precision."""


def _table(rates: Mapping[str, float]) -> Mapping[str, float]:
    unknown = next((name for name in rates if name not in DTYPES), None)
    if unknown is not None:
        raise ConfigError(f"unknown dtype {unknown!r} of a chip; {nearest(unknown, DTYPES)}")
    return MappingProxyType(dict(rates))


@frozen(kw_only=True)
class Chip:
    """A device as visible to a process; for the Ascend 910C a single die."""

    name: str
    memory_gib: float
    """Total memory reported by the driver."""
    memory_gb_per_s: float
    """Peak memory bandwidth, in 10^9 bytes per second."""
    peak_tflops: Mapping[str, float] = field(converter=_table)
    """Peak rate of dense matrix products by dtype, in 10^12 operations per second."""
    link_gb_per_s: float
    """Bandwidth within a node, over all links of a device in one direction, in 10^9 bytes/s."""
    node_devices: int = 8
    """Devices of a typical node."""
    mesh: bool = False
    """The devices of a node are connected pairwise, without a switch, so a subset has only part of
    the bandwidth."""
    source: str
    """Source of the numbers."""
    by_vendor: bool = True
    """The numbers are published by the vendor."""

    def peak(self, dtype: str) -> float:
        """Peak rate of dense matrix products, in operations per second.

        Raises:
            ConfigError: the chip does not support the dtype.
        """
        if dtype not in self.peak_tflops:
            names = ", ".join(self.peak_tflops)
            raise ConfigError(f"{self.name} has no {dtype} matrix products; use one of {names}")
        return self.peak_tflops[dtype] * 1e12


def _half(rate: float, **others: float) -> dict[str, float]:
    """Peak rates of a chip with the same rate for float16 and bfloat16."""
    return {"float16": rate, "bfloat16": rate, **others}


# H100 (SXM), H800 and H200 have the same cores; memory and links differ.
_HOPPER = _half(989.4, float8=1978.9, tf32=494.7, float32=66.9)
# HCCS: 7 links of 28 GB/s in one direction are 196 GB/s.
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
        # Volta's tensor cores do not support bfloat16.
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


ALIASES: Mapping[str, str] = MappingProxyType(
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
"""Most common chip for each short name."""


def chip_named(name: str) -> Chip:
    """Look up a known chip.

    Args:
        name: name, or a short name in `ALIASES`; case and the choice of spaces, hyphens or
            underscores do not matter.

    Raises:
        ConfigError: the chip is unknown.
    """
    plain = name.lower().replace(" ", "-").replace("_", "-")
    chip = CHIPS.get(ALIASES.get(plain, plain))
    if chip is None:
        raise ConfigError(f"unknown chip {name!r}; {nearest(plain, [*CHIPS, *ALIASES])}")
    return chip

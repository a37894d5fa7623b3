"""Constants of the roofline for families of chips, calibrated on published runs.

`benchmarks/published_runs.py --fit` fits them to one half of its rows and prints them;
`benchmarks/published.md` reports the errors on the other half. The constants for the network, for
overlap and for waiting are shared by all chips of a vendor. `h200` and `h800-sxm` use the
constants of `h100-sxm`, as only their memory and links differ. For lack of published runs, AMD
chips and the Ascend 910C use the constants of the closest chip.
"""

from collections.abc import Mapping
from math import inf, log
from types import MappingProxyType
from typing import Final

from attrs import evolve, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.chips import CHIPS, Chip, chip_named
from ms_parallel.planner.roofline.efficiency import Efficiency

PASSES: Final[Mapping[str, float]] = MappingProxyType(
    {"fused": 1.0, "eager": 3.01, "torch_npu": 2.15}
)
"""`StepSettings.passes` by implementation of elementwise operators: fused, eager PyTorch, and
torch_npu, which fuses some."""
BACKWARD_SHARE: Final = 0.8
"""Achieved rate of FlashAttention's backward relative to its forward. Assumed, after Dao 2023
(FlashAttention-2), figures 5 and 6."""


def _efficiency(half: float, float8: float, attention: float) -> Efficiency:
    return Efficiency(
        products={"bfloat16": half, "float16": half, "float8": float8},
        attention=attention,
        attention_backward=BACKWARD_SHARE * attention,
        memory=0.7664,
        traffic=0.7407,
        node=0.7209,
        network=0.7521,
        hidden=0.7663,
        step_ms=62.82,
        waiting=0.003843,
    )


_ASCEND: Final = evolve(
    _efficiency(0.6531, 0.6531, 0.5191),
    memory=0.5396,
    traffic=0.9849,
    node=0.6171,
    hidden=0.643,
)
FAMILIES: Final[Mapping[str, Efficiency]] = MappingProxyType(
    {
        "a100": _efficiency(0.7684, 0.7684, 0.5547),
        "h100": _efficiency(0.6812, 0.6139, 0.4664),
        # Power-limited to 500 W instead of 700 W.
        "h100-500w": _efficiency(0.6184, 0.4936, 0.2329),
        "b200": _efficiency(0.6812, 0.6126, 0.4844),
        "ascend-910b": _ASCEND,
    }
)
"""Constants by chip family."""
FAMILY_OF: Final[Mapping[str, str]] = MappingProxyType(
    {
        "v100-32": "a100",
        "a100-40": "a100",
        "a100-80": "a100",
        "h100-sxm": "h100",
        "h100-pcie": "h100-500w",
        "h800-sxm": "h100",
        "h200": "h100",
        "b200": "b200",
        "mi300x": "h100",
        "ascend-910b1": "ascend-910b",
        "ascend-910b2": "ascend-910b",
        "ascend-910b3": "ascend-910b",
        "ascend-910b4": "ascend-910b",
        "ascend-910c": "ascend-910b",
    }
)
"""Family of each known chip."""
_COMPARED: Final = ("bfloat16", "float16", "float32", "tf32", "float8")
"""Dtypes for comparing peak rates; the first that both chips have is used."""


def efficiency_of(chip: str) -> Efficiency:
    """Return the constants of a known chip.

    Raises:
        ConfigError: the chip is unknown.
    """
    return FAMILIES[FAMILY_OF[chip_named(chip).name]]


@frozen(kw_only=True)
class Calibration:
    """Chip whose constants are used for a cluster."""

    chip: str
    """The cluster's chip if it is a known one, else the known chip with the closest rates."""
    is_exact: bool
    """The chip is the cluster's."""

    @property
    def efficiency(self) -> Efficiency:
        """Efficiency constants of the chip."""
        return efficiency_of(self.chip)


def calibration_of(cluster: Cluster) -> Calibration:
    """Look up the cluster's chip, or else the known chip of the same device type closest to it.

    The distance is the sum of squared log ratios of the matrix product rate, the memory bandwidth
    and, if the cluster has them, the bandwidth of intra-node links.
    """
    try:
        return Calibration(chip=chip_named(cluster.chip or "").name, is_exact=True)
    except ConfigError:  # unknown, or not named
        is_npu = cluster.device == "npu"
        candidates = [chip for chip in CHIPS.values() if _is_ascend(chip) == is_npu]
        nearest = min(candidates, key=lambda chip: _distance(chip, cluster))
        return Calibration(chip=nearest.name, is_exact=False)


def _is_ascend(chip: Chip) -> bool:
    return chip.name.startswith("ascend")


def _distance(chip: Chip, cluster: Cluster) -> float:
    rates = [name for name in _COMPARED if name in cluster.peak_tflops and name in chip.peak_tflops]
    pairs = [(cluster.memory_bandwidth_gb_per_s, chip.memory_gb_per_s)]
    pairs += [(cluster.peak_tflops[name], chip.peak_tflops[name]) for name in rates[:1]]
    if cluster.links.node is not None:
        pairs.append((cluster.links.node.bandwidth_gb_per_s, chip.link_gb_per_s))
    distance = sum(log(cluster_rate / chip_rate) ** 2 for cluster_rate, chip_rate in pairs)
    return distance if rates else inf  # no dtype to compare

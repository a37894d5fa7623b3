"""Constants of the roofline for families of chips, calibrated on published runs.

`benchmarks/published_runs.py --fit` finds them on one half of its rows and prints them;
`benchmarks/published.md` tells how well they predict the other half. Shares of the network, what
overlap hides and what devices wait are one for all chips of one maker; those of `h200` and
`h800-sxm` are `h100-sxm`'s, since nothing but memory and links differ. No run of an AMD chip and
none of an Ascend 910C is among the rows: these have the constants of the nearest chip.
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
"""`StepSettings.passes` by how element-wise steps run: fused, one by one as in PyTorch without
compilation, and in part fused as torch_npu's operators are."""
BACKWARD_SHARE: Final = 0.8
"""Rate of fused attention's backward by that of its forward: assumed, from Dao 2023's figures 5
and 6."""


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
        # Limited to 500 W of 700 W.
        "h100-500w": _efficiency(0.6184, 0.4936, 0.2329),
        "b200": _efficiency(0.6812, 0.6126, 0.4844),
        "ascend-910b": _ASCEND,
    }
)
"""By family."""
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
"""Dtypes by whose rate chips are compared: the first that both have."""


def efficiency_of(chip: str) -> Efficiency:
    """Return the constants of a known chip.

    Raises:
        ConfigError: `chip_named` knows no such chip.
    """
    return FAMILIES[FAMILY_OF[chip_named(chip).name]]


@frozen(kw_only=True)
class Calibration:
    """Whose constants a cluster's times are predicted with."""

    chip: str
    """The known chip: that of the cluster, or the one whose figures are nearest to its own."""
    known: bool
    """Whether it is the cluster's."""

    @property
    def efficiency(self) -> Efficiency:
        """The constants."""
        return efficiency_of(self.chip)


def calibration_of(cluster: Cluster) -> Calibration:
    """Find the chip that a cluster names, or else the known one of most like figures.

    The nearest has the least sum of squared logarithms of ratios: of the rate of matrix products,
    of the memory's bandwidth, and where a node has links, of theirs.
    """
    try:
        return Calibration(chip=chip_named(cluster.chip or "").name, known=True)
    except ConfigError:
        of_kind = [each for each in CHIPS.values() if _is_ascend(each) == (cluster.device == "npu")]
        nearest = min(of_kind, key=lambda each: _distance(each, cluster))
        return Calibration(chip=nearest.name, known=False)


def _is_ascend(chip: Chip) -> bool:
    return chip.name.startswith("ascend")


def _distance(chip: Chip, cluster: Cluster) -> float:
    rates = [name for name in _COMPARED if name in cluster.peak_tflops and name in chip.peak_tflops]
    pairs = [(cluster.memory_bandwidth_gb_per_s, chip.memory_gb_per_s)]
    pairs += [(cluster.peak_tflops[name], chip.peak_tflops[name]) for name in rates[:1]]
    if cluster.links.node is not None:
        pairs.append((cluster.links.node.bandwidth_gb_per_s, chip.link_gb_per_s))
    distance = sum(log(here / there) ** 2 for here, there in pairs)
    return distance if rates else inf

"""Clusters of known chips, as `ms_parallel.planner.cluster` describes clusters."""

from typing import Final

from ms_parallel.planner.cluster import DTYPES, Cluster, Link, Links
from ms_parallel.planner.roofline.chips import chip_named

NODE_US: Final = 3.0
NETWORK_US: Final = 6.0
"""Latencies of a step of a collective, assumed: a data sheet has none."""


def known_cluster(chip: str, devices: int, *, network_gb_per_s: float) -> Cluster:
    """Describe so many devices of a known chip, in the nodes that are usual for it.

    Args:
        chip: its name in `CHIPS`.
        devices: of all nodes.
        network_gb_per_s: 10⁹ bytes that a device sends to other nodes in a second; 50 for a
            network card of 400 Gb/s a device.

    Raises:
        ConfigError: the chip is not known, or a number is out of range.
    """
    found = chip_named(chip)
    node = min(devices, found.node_devices)
    # Links of pairs reach those that are there.
    links = (node - 1) / (found.node_devices - 1) if found.mesh and node > 1 else 1.0
    return Cluster(
        chip=found.name,
        nodes=-(-devices // node),
        devices_per_node=node,
        mesh=found.mesh,
        memory_gib=found.memory_gib,
        memory_bandwidth_gb_per_s=found.memory_gb_per_s,
        peak_tflops={name: rate for name, rate in found.peak_tflops.items() if name in DTYPES},
        links=Links(
            node=Link(latency_us=NODE_US, bandwidth_gb_per_s=found.link_gb_per_s * links),
            network=Link(latency_us=NETWORK_US, bandwidth_gb_per_s=network_gb_per_s),
        ),
    )

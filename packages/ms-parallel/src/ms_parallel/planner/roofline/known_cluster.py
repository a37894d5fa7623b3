"""Clusters of known chips, as `ms_parallel.planner.cluster` describes clusters."""

from typing import Final

from ms_parallel.planner.cluster import DTYPES, Cluster, ClusterLinks, Link
from ms_parallel.planner.roofline.chips import chip_named

NODE_US: Final = 3.0
NETWORK_US: Final = 6.0
"""Latencies of one step of a collective. These are assumptions, as data sheets do not list them."""


def known_cluster(chip: str, devices: int, *, network_gb_per_s: float) -> Cluster:
    """Describe a cluster of a known chip, with the usual number of devices per node.

    Args:
        chip: name of the chip in `CHIPS`.
        devices: total number of devices.
        network_gb_per_s: 10⁹ bytes per second that a device sends to other nodes; 50 for a 400 Gb/s
            network card per device.

    Raises:
        ConfigError: the chip is unknown, or a number is out of range.
    """
    spec = chip_named(chip)
    per_node = min(devices, spec.node_devices)
    # In a mesh without a switch, a partly used node also has only part of the pairwise links.
    used_links = (per_node - 1) / (spec.node_devices - 1) if spec.mesh and per_node > 1 else 1.0
    return Cluster(
        chip=spec.name,
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        mesh=spec.mesh,
        memory_gib=spec.memory_gib,
        memory_bandwidth_gb_per_s=spec.memory_gb_per_s,
        peak_tflops={name: rate for name, rate in spec.peak_tflops.items() if name in DTYPES},
        links=ClusterLinks(
            node=Link(latency_us=NODE_US, bandwidth_gb_per_s=spec.link_gb_per_s * used_links),
            network=Link(latency_us=NETWORK_US, bandwidth_gb_per_s=network_gb_per_s),
        ),
    )

"""Time of collectives on a cluster, from the latency and bandwidth of each level.

A ring crosses each node boundary once per network card, so with r ranks of the group in a node, a
device sends 1/r of the data between nodes. Both levels transfer at the same time, so the slower one
determines the bandwidth term; latencies add up (Thakur et al. 2005; NCCL's rings).
"""

from typing import Final, Literal

from attrs import frozen

from ms_parallel.planner.cluster import Cluster, Link
from ms_parallel.planner.roofline.efficiency import Efficiency

MICRO = 1e-6
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
FULL_EFFICIENCY: Final = Efficiency()
"""For links whose bandwidth is already the achieved one."""


@frozen(kw_only=True)
class RankGroup:
    """Ranks of a collective: `count` ranks, `stride` devices apart."""

    count: int
    stride: int = 1

    def per_node(self, cluster: Cluster) -> int:
        """Number of ranks of the group in one node."""
        return max(1, min(self.count, cluster.devices_per_node // self.stride))


def collective_s(
    cluster: Cluster, kind: Collective, size_bytes: float, ranks: int, stride: int = 1
) -> float:
    """Predict the seconds of a collective.

    Args:
        cluster: cluster with the links.
        kind: kind of collective; `send` is one message to a neighbor.
        size_bytes: size of the full tensor on a rank: the result of a gather, the input of a
            reduction; for `all_to_all` and `send`, the size of a rank's input.
        ranks: number of ranks; a single rank takes no time.
        stride: distance between consecutive ranks, in devices.
    """
    if ranks == 1 or size_bytes == 0:
        return 0.0
    if kind == "send":
        return send_seconds(size_bytes, stride, cluster, FULL_EFFICIENCY)
    group = RankGroup(count=ranks, stride=stride)
    if kind == "all_to_all":
        return exchange_seconds(size_bytes, group, cluster, FULL_EFFICIENCY)
    if kind == "all_reduce":
        return reduce_seconds(size_bytes, group, cluster, FULL_EFFICIENCY)
    return gather_seconds(size_bytes, group, cluster, FULL_EFFICIENCY, kind)


def gather_seconds(
    size_bytes: float,
    group: RankGroup,
    cluster: Cluster,
    efficiency: Efficiency,
    kind: Collective = "all_gather",
) -> float:
    """Predict the seconds of an all-gather or a reduce-scatter.

    Args:
        size_bytes: size of the full tensor: output of the gather or input of the scatter.
        group: participating ranks.
        cluster: cluster with the links.
        efficiency: achieved fractions of the link bandwidths.
        kind: collective whose measured times within a node are used, if the cluster has them.
    """
    if group.count == 1 or not size_bytes:
        return 0.0
    local = group.per_node(cluster)  # r in the module's docstring
    nodes = -(-group.count // local)
    bandwidth_s = latency_s = 0.0
    if local > 1:
        bandwidth, delay = _intra_node(cluster, group, efficiency, kind)
        # A ring of n ranks sends 1/n of the tensor in each of n - 1 steps.
        bandwidth_s = size_bytes * (local - 1) / local / bandwidth
        latency_s = (local - 1) * delay
    if nodes > 1:
        bandwidth, delay = _inter_node(cluster, efficiency)
        inter_node_s = size_bytes * (nodes - 1) / nodes / (local * bandwidth)
        bandwidth_s = max(bandwidth_s, inter_node_s)
        # NCCL switches from a ring to a tree when the ring's latency exceeds the tree's.
        latency_s += min(nodes - 1, 2 * nodes.bit_length()) * delay
    return bandwidth_s + latency_s


def reduce_seconds(
    size_bytes: float, group: RankGroup, cluster: Cluster, efficiency: Efficiency
) -> float:
    """Predict the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(size_bytes, group, cluster, efficiency, "all_reduce")


def exchange_seconds(
    size_bytes: float, group: RankGroup, cluster: Cluster, efficiency: Efficiency
) -> float:
    """Predict the seconds of an all-to-all.

    Args:
        size_bytes: size of a rank's input; 1/count of it stays on the rank.
        group: participating ranks.
        cluster: cluster with the links.
        efficiency: achieved fractions of the link bandwidths.
    """
    if group.count == 1 or not size_bytes:
        return 0.0
    local = group.per_node(cluster)
    seconds = 0.0
    if local > 1:
        bandwidth, delay = _intra_node(cluster, group, efficiency, "all_to_all")
        # All peers exchange at the same time, so one latency counts.
        seconds = size_bytes * (local - 1) / group.count / bandwidth + delay
    if group.count > local:
        bandwidth, delay = _inter_node(cluster, efficiency)
        inter_node_s = size_bytes * (group.count - local) / group.count / bandwidth
        seconds = max(seconds, inter_node_s) + delay
    return seconds


def send_seconds(
    size_bytes: float, distance: int, cluster: Cluster, efficiency: Efficiency
) -> float:
    """Predict the seconds of a message to the device at a distance in devices."""
    bandwidth, delay = _link(cluster, distance + 1, 1, efficiency)
    return size_bytes / bandwidth + delay


def _intra_node(
    cluster: Cluster, group: RankGroup, efficiency: Efficiency, kind: Collective
) -> tuple[float, float]:
    """Bandwidth of a rank (bytes/s) and latency (s) within a node."""
    measured: Link | None = getattr(cluster.collectives, kind, None)
    if measured is not None:
        return measured.bandwidth_gb_per_s * 1e9, measured.latency_us * MICRO
    local = group.per_node(cluster)
    return _link(cluster, (local - 1) * group.stride + 1, local - 1, efficiency)


def _inter_node(cluster: Cluster, efficiency: Efficiency) -> tuple[float, float]:
    """Bandwidth of a device (bytes/s) and latency (s) between nodes."""
    # Any distance longer than a node.
    return _link(cluster, cluster.devices_per_node + 1, 1, efficiency)


def _link(cluster: Cluster, span: int, peers: int, efficiency: Efficiency) -> tuple[float, float]:
    """Bandwidth (bytes/s) and latency (s) of the link that spans a number of devices.

    In a mesh, a rank that communicates with `peers` devices uses only the links to these.
    """
    span = min(span, cluster.devices)
    link, level = cluster.link(span), cluster.level(span)
    fraction = efficiency.network if level == "network" else efficiency.node
    if cluster.mesh and level == "node":
        fraction *= peers / (cluster.devices_per_node - 1)
    return link.bandwidth_gb_per_s * 1e9 * fraction, link.latency_us * MICRO

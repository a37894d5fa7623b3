"""Time of collectives over the levels of a cluster, by latency and bandwidth.

A ring passes through every node once for each network card of the node, so what a device sends
between nodes shrinks by the members that its node has. Both levels work at once, and the slower one
counts (Thakur et al. 2005; NCCL's rings).
"""

from typing import Final, Literal

from attrs import frozen

from ms_parallel.planner.cluster import Cluster, Link
from ms_parallel.planner.roofline.efficiency import Efficiency

MICRO = 1e-6
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
REACHED: Final = Efficiency()
"""All of a bandwidth, since it is already what is reached."""


@frozen(kw_only=True)
class Members:
    """Ranks of a group: so many, `stride` devices apart."""

    count: int
    stride: int = 1

    def in_node(self, cluster: Cluster) -> int:
        """Return how many of the members one node has."""
        return max(1, min(self.count, cluster.devices_per_node // self.stride))


def collective_s(
    cluster: Cluster, kind: Collective, size_bytes: float, ranks: int, stride: int = 1
) -> float:
    """Predict the seconds of a collective.

    Args:
        cluster: whose links are crossed.
        kind: `send` is one message to a neighbor.
        size_bytes: of what a rank has when all is together: gathered, or before it is scattered;
            of `all_to_all` and `send`, of what a rank gives.
        ranks: that take part; one takes no time.
        stride: how far apart two neighbors lie, in devices.
    """
    if ranks == 1 or size_bytes == 0:
        return 0.0
    if kind == "send":
        return send_seconds(size_bytes, stride, cluster, REACHED)
    members = Members(count=ranks, stride=stride)
    if kind == "all_to_all":
        return exchange_seconds(size_bytes, members, cluster, REACHED)
    if kind == "all_reduce":
        return reduce_seconds(size_bytes, members, cluster, REACHED)
    return gather_seconds(size_bytes, members, cluster, REACHED, kind)


def gather_seconds(
    whole_bytes: float,
    members: Members,
    cluster: Cluster,
    efficiency: Efficiency,
    kind: Collective = "all_gather",
) -> float:
    """Predict the seconds of an all-gather to `whole_bytes`, or of a reduce-scatter from them."""
    if members.count == 1 or not whole_bytes:
        return 0.0
    near = members.in_node(cluster)
    nodes = -(-members.count // near)
    slowest = latency = 0.0
    if near > 1:
        bandwidth, delay = _near(cluster, members, efficiency, kind)
        slowest = whole_bytes * (near - 1) / near / bandwidth
        latency = (near - 1) * delay
    if nodes > 1:
        bandwidth, delay = _far(cluster, efficiency)
        slowest = max(slowest, whole_bytes * (nodes - 1) / nodes / (near * bandwidth))
        # NCCL takes a tree where a ring would wait for each node in turn.
        latency += min(nodes - 1, 2 * nodes.bit_length()) * delay
    return slowest + latency


def reduce_seconds(
    whole_bytes: float, members: Members, cluster: Cluster, efficiency: Efficiency
) -> float:
    """Predict the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(whole_bytes, members, cluster, efficiency, "all_reduce")


def exchange_seconds(
    sent_bytes: float, members: Members, cluster: Cluster, efficiency: Efficiency
) -> float:
    """Predict the seconds of an all-to-all that parts `sent_bytes` among all, itself too."""
    if members.count == 1 or not sent_bytes:
        return 0.0
    near = members.in_node(cluster)
    seconds = 0.0
    if near > 1:
        bandwidth, delay = _near(cluster, members, efficiency, "all_to_all")
        seconds = sent_bytes * (near - 1) / members.count / bandwidth + delay
    if members.count > near:
        bandwidth, delay = _far(cluster, efficiency)
        far = sent_bytes * (members.count - near) / members.count / bandwidth
        seconds = max(seconds, far) + delay
    return seconds


def send_seconds(
    size_bytes: float, distance: int, cluster: Cluster, efficiency: Efficiency
) -> float:
    """Predict the seconds of a message to the rank `distance` devices further."""
    bandwidth, delay = _level(cluster, distance + 1, 1, efficiency)
    return size_bytes / bandwidth + delay


def _near(
    cluster: Cluster, members: Members, efficiency: Efficiency, kind: Collective
) -> tuple[float, float]:
    """Return a member's bytes a second, and seconds of latency, among those of its node."""
    measured: Link | None = getattr(cluster.collectives, kind, None)
    if measured is not None:
        return measured.bandwidth_gb_per_s * 1e9, measured.latency_us * MICRO
    near = members.in_node(cluster)
    return _level(cluster, (near - 1) * members.stride + 1, near - 1, efficiency)


def _far(cluster: Cluster, efficiency: Efficiency) -> tuple[float, float]:
    """Return the bytes a second, and the seconds of latency, between nodes."""
    return _level(cluster, cluster.devices_per_node + 1, 1, efficiency)


def _level(
    cluster: Cluster, span: int, partners: int, efficiency: Efficiency
) -> tuple[float, float]:
    """Return the bytes a second, and the seconds of latency, to some of so many neighbors."""
    span = min(span, cluster.devices)
    link, level = cluster.link(span), cluster.level(span)
    share = efficiency.network if level == "network" else efficiency.node
    if cluster.mesh and level == "node":
        share *= partners / (cluster.devices_per_node - 1)
    return link.bandwidth_gb_per_s * 1e9 * share, link.latency_us * MICRO

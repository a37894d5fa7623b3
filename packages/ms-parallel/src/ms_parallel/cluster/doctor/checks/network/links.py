"""Whether messages between ranks go as fast as the links between them can."""

from collections.abc import Iterator
from statistics import median

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import npu_ports
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, GIGABIT, chosen_ports
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined, Pair, Recording
from ms_parallel.cluster.doctor.registry import check

LEAST_SHARE = 0.5
"""Least share of the link's rate that a message of 16 MiB reaches on sound links."""
LEAST_OF_OTHERS = 0.33
"""Least share of the median of like pairs; shared processors alone spread gloo's by about two."""


MOST_LATENCY_US = 5_000.0
"""Longest one-way latency of the smallest message that is not reported. A switched network takes
under 100 microseconds and busy processors add about a millisecond; this is a distance of 1,000 km
or a shaped, virtual or failing link."""
LEAST_GB_PER_S = 0.05
"""Least rate that is not reported, where the rate of the link is not known: half of what Ethernet
of 1 Gb/s carries."""


@check(
    "links",
    "messages between ranks go at the rates of their links",
    needs=lambda examined: bool(examined.measured.pairs),
)
def links(examined: Examined) -> Iterator[Finding]:
    """Compare pairs with their link, with pairs as far apart, and with absolute limits."""
    nodes = {one.machine.rank: (one.machine.node, one.machine.host) for one in examined.ranks}
    pairs = examined.measured.pairs
    for far in (False, True):
        like = [pair for pair in pairs if (nodes[pair.first] != nodes[pair.second]) == far]
        if not like:
            continue
        usual = median(pair.bandwidth_gb_per_s for pair in like)
        for pair in like:
            at = examined.rank(pair.first)
            where = f"ranks {pair.first} and {pair.second}"
            rate = _link_gb_per_s(examined, pair) if far else None
            if pair.latency_us > MOST_LATENCY_US:
                yield _late(pair, at, where)
            if rate is not None and pair.bandwidth_gb_per_s < LEAST_SHARE * rate:
                yield _slow(examined, pair, at, where, rate)
            elif pair.bandwidth_gb_per_s < LEAST_OF_OTHERS * usual:
                yield warning(
                    at,
                    where,
                    what=f"they move {pair.bandwidth_gb_per_s:.2f} GB/s, and like pairs"
                    f" {usual:.2f} GB/s in the median",
                    why="collectives go at the rate of the slowest pair",
                    remedy="run the doctor again on quiet machines; if it stays, look at what the"
                    " two share: a switch, a slot, a processor",
                )
            elif pair.bandwidth_gb_per_s < LEAST_GB_PER_S:
                yield warning(
                    at,
                    where,
                    what=f"they move {pair.bandwidth_gb_per_s:.3g} GB/s, less than half of what"
                    " Ethernet of 1 Gb/s carries",
                    why="gradients of a billion float32 parameters need"
                    f" {4 / pair.bandwidth_gb_per_s:,.0f} s per step at this rate",
                    remedy="choose the interface of a faster network (GLOO_SOCKET_IFNAME,"
                    " NCCL_SOCKET_IFNAME), and measure the link with iperf3",
                )


def _late(pair: Pair, at: Recording, where: str) -> Finding:
    return warning(
        at,
        where,
        what=f"the smallest message takes {pair.latency_us / 1e3:,.1f} ms one way; above"
        f" {MOST_LATENCY_US / 1e3:g} ms is too slow for training",
        why="every collective waits that long at least twice, and a step has many of them",
        remedy="compare with ping; use machines of one site and the interface of their fastest"
        " network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or put the slow link between data"
        " or pipeline ranks only",
    )


def _slow(examined: Examined, pair: Pair, at: Recording, where: str, rate: float) -> Finding:
    say = warning if examined.measured.together else failure
    return say(
        at,
        where,
        what=f"they move {pair.bandwidth_gb_per_s:.2f} GB/s over a link of {rate:.1f} GB/s",
        why="collectives between machines take that many times longer",
        remedy="look at what the library says that it uses (NCCL_DEBUG=INFO), at GPUDirect, at"
        " which adapter is near which device (nvidia-smi topo -m) and at congestion",
    )


def _link_gb_per_s(examined: Examined, pair: Pair) -> float | None:
    """Return what the slower of two ranks' ports can move in a second, in 10⁹ bytes."""
    rates = [_port_gb_per_s(examined, rank) for rank in (pair.first, pair.second)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _port_gb_per_s(examined: Examined, rank: int) -> float | None:
    machine = examined.machine_of(rank)
    choice = value(examined, machine, "NCCL_IB_HCA")
    rates = [
        port.rate_gbit_per_s
        for port in chosen_ports(machine, choice)
        if port.state == ACTIVE and port.rate_gbit_per_s is not None
    ]
    rates += [p.rate_gbit_per_s for p in npu_ports(machine) if p.rate_gbit_per_s is not None]
    uses_rdma = examined.measured.backend in ("nccl", "hccl")
    return max(rates) * GIGABIT / 1e9 if rates and uses_rdma else None

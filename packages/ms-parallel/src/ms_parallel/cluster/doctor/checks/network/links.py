"""Check that messages between ranks are as fast as the links allow."""

from collections.abc import Iterator
from statistics import median

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import npu_ports
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, GIGABIT, chosen_ports
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined, Pair, Recording
from ms_parallel.cluster.doctor.registry import check

MIN_LINK_FRACTION = 0.5
"""Fraction of the link rate that 16 MiB messages reach on healthy links."""
MIN_MEDIAN_FRACTION = 0.33
"""Fraction of the median of similar pairs; shared CPUs alone vary gloo's rates by about two."""


MAX_LATENCY_US = 5_000.0
"""Maximum one-way latency of the smallest message. A switched network takes under 100 microseconds,
and busy CPUs add about a millisecond; more means a distance of 1,000 km, or a shaped, virtual or
failing link."""
MIN_GB_PER_S = 0.05
"""Minimum rate if the link rate is not known: half of what 1 Gb/s Ethernet carries."""


@check(
    "links",
    "messages between ranks reach the rates of their links",
    needs=lambda examined: bool(examined.measured.pairs),
)
def links(examined: Examined) -> Iterator[Finding]:
    """Compare pairs with their link rate, with similar pairs, and with absolute limits."""
    nodes = {
        recording.machine.rank: (recording.machine.node, recording.machine.host)
        for recording in examined.ranks
    }
    pairs = examined.measured.pairs
    for across_nodes in (False, True):
        similar = [
            pair for pair in pairs if (nodes[pair.first] != nodes[pair.second]) == across_nodes
        ]
        if not similar:
            continue
        median_rate = median(pair.bandwidth_gb_per_s for pair in similar)
        for pair in similar:
            recording = examined.rank(pair.first)
            where = f"ranks {pair.first} and {pair.second}"
            rate = _link_gb_per_s(examined, pair) if across_nodes else None
            if pair.latency_us > MAX_LATENCY_US:
                yield _late(pair, recording, where)
            if rate is not None and pair.bandwidth_gb_per_s < MIN_LINK_FRACTION * rate:
                yield _slow(examined, pair, recording, where, rate)
            elif pair.bandwidth_gb_per_s < MIN_MEDIAN_FRACTION * median_rate:
                yield warning(
                    recording,
                    where,
                    what=f"they reach {pair.bandwidth_gb_per_s:.2f} GB/s, and similar pairs"
                    f" {median_rate:.2f} GB/s (median)",
                    why="collectives run at the rate of the slowest pair",
                    remedy="run the doctor again on idle machines; if it persists, check what the"
                    " two share: a switch, a slot, a CPU",
                )
            elif pair.bandwidth_gb_per_s < MIN_GB_PER_S:
                yield warning(
                    recording,
                    where,
                    what=f"they reach {pair.bandwidth_gb_per_s:.3g} GB/s, less than half of 1 Gb/s"
                    " Ethernet",
                    why="gradients of a billion float32 parameters need"
                    f" {4 / pair.bandwidth_gb_per_s:,.0f} s per step at this rate",
                    remedy="select the interface of a faster network (GLOO_SOCKET_IFNAME,"
                    " NCCL_SOCKET_IFNAME), and measure the link with iperf3",
                )


def _late(pair: Pair, recording: Recording, where: str) -> Finding:
    return warning(
        recording,
        where,
        what=f"the smallest message takes {pair.latency_us / 1e3:,.1f} ms one way; more than"
        f" {MAX_LATENCY_US / 1e3:g} ms is too slow for training",
        why="every collective waits at least twice that long, and a step has many of them",
        remedy="compare with ping; use machines of one site and the interface of their fastest"
        " network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or use the slow link only between data"
        " or pipeline ranks",
    )


def _slow(examined: Examined, pair: Pair, recording: Recording, where: str, rate: float) -> Finding:
    report = warning if examined.measured.together else failure
    return report(
        recording,
        where,
        what=f"they reach {pair.bandwidth_gb_per_s:.2f} GB/s on a link of {rate:.1f} GB/s",
        why="collectives between machines take that many times longer",
        remedy="check which transport the library reports (NCCL_DEBUG=INFO), GPUDirect, which"
        " adapter is near which device (nvidia-smi topo -m), and congestion",
    )


def _link_gb_per_s(examined: Examined, pair: Pair) -> float | None:
    """Rate of the slower of two ranks' ports, in 10⁹ bytes per second; None if unknown."""
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

"""Checks of joint measurements: links, clocks and the output folder."""

from collections.abc import Iterator
from statistics import median
from typing import Final

from ms_profile.doctor.checks import DoctorFinding, check, failure, warning
from ms_profile.doctor.network import chosen_ports, value
from ms_profile.doctor.recording import Examined, Folder, MachineRecording, Pair
from ms_profile.doctor.vendor_tools import npu_ports

MIN_LINK_FRACTION: Final = 0.5
"""Fraction of the link rate that 16 MiB messages reach on healthy links."""
MIN_MEDIAN_FRACTION: Final = 0.33
"""Fraction of the median of similar pairs; shared CPUs alone vary gloo's rates by about two."""
MAX_LATENCY_US: Final = 5_000.0
"""Maximum one-way latency of the smallest message. A switched network takes under 100 microseconds,
and busy CPUs add about a millisecond; more means a distance of 1,000 km, or a shaped, virtual or
failing link."""
MIN_GB_PER_S: Final = 0.05
"""Minimum rate if the link rate is not known: half of what 1 Gb/s Ethernet carries."""
FAILS_S, WARNS_S = 0.5, 0.05
"""Clock offsets that fail and that warn."""
FAILS_MB_PER_S, WARNS_MB_PER_S = 20.0, 100.0
BYTES_PER_PARAMETER: Final = 14
"""Bytes per parameter in a checkpoint: weights, a float32 copy and Adam's two moments."""
EXAMPLE_PARAMETERS: Final = 7e9


@check(
    "links",
    "messages between ranks reach the rates of their links",
    needs=lambda examined: bool(examined.measured.pairs),
)
def links(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare pairs with their link rate, with similar pairs, and with absolute limits."""
    nodes = [recording.node for recording in examined.ranks]
    pairs = examined.measured.pairs
    # Pairs within a machine and pairs across machines use different links, so compare them
    # separately.
    for across_nodes in (False, True):
        similar = [
            pair for pair in pairs if (nodes[pair.first] != nodes[pair.second]) == across_nodes
        ]
        if not similar:
            continue
        median_rate = median(pair.bandwidth_gb_per_s for pair in similar)
        for pair in similar:
            recording = examined.ranks[pair.first]
            where = f"ranks {pair.first} and {pair.second}"
            rate = _link_gb_per_s(examined, pair) if across_nodes else None
            if pair.latency_us > MAX_LATENCY_US:
                yield _latency_warning(pair, recording, where)
            if rate is not None and pair.bandwidth_gb_per_s < MIN_LINK_FRACTION * rate:
                yield _bandwidth_finding(examined, pair, recording, where, rate)
            elif pair.bandwidth_gb_per_s < MIN_MEDIAN_FRACTION * median_rate:
                yield warning(
                    recording,
                    where,
                    what=f"they reach {pair.bandwidth_gb_per_s:.2f} GB/s, and similar pairs"
                    f" {median_rate:.2f} GB/s (median)",
                    why="collectives run at the rate of the slowest pair",
                    remedy="run the doctor again on idle machines; if it persists, look for a"
                    " shared cause: a switch, a slot, a CPU",
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


def _latency_warning(pair: Pair, recording: MachineRecording, where: str) -> DoctorFinding:
    return warning(
        recording,
        where,
        what=f"the smallest message takes {pair.latency_us / 1e3:,.1f} ms one way; more than"
        f" {MAX_LATENCY_US / 1e3:g} ms is too slow for training",
        why="every collective waits at least twice that long, and a step has many collectives",
        remedy="compare with ping; use machines of one site and the interface of their fastest"
        " network (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), or use the slow link only between data"
        " or pipeline ranks",
    )


def _bandwidth_finding(
    examined: Examined, pair: Pair, recording: MachineRecording, where: str, rate: float
) -> DoctorFinding:
    # Pairs that were measured together may have shared a switch.
    report = warning if examined.measured.together else failure
    return report(
        recording,
        where,
        what=f"they reach {pair.bandwidth_gb_per_s:.2f} GB/s on a link of {rate:.1f} GB/s",
        why="collectives between machines take longer by the same factor",
        remedy="check which transport the library reports (NCCL_DEBUG=INFO), GPUDirect, which"
        " adapter is near which device (nvidia-smi topo -m), and congestion",
    )


def _link_gb_per_s(examined: Examined, pair: Pair) -> float | None:
    """Rate of the slower of two ranks' ports, in 10⁹ bytes per second; None if unknown."""
    rates = [_port_gb_per_s(examined, rank) for rank in (pair.first, pair.second)]
    return min(rate for rate in rates if rate is not None) if None not in rates else None


def _port_gb_per_s(examined: Examined, rank: int) -> float | None:
    if examined.measured.backend not in ("nccl", "hccl"):  # not over RDMA
        return None
    machine = examined.machine_of(examined.ranks[rank])
    choice = value(examined, machine, "NCCL_IB_HCA")
    active = [port for port in chosen_ports(machine, choice) if port.is_active]
    rates = [port.rate_gbit_per_s for port in active]
    rates += [port.rate_gbit_per_s for port in npu_ports(machine)]
    # Assume the fastest port, as the port that a rank uses is not known here.
    return max((rate / 8 for rate in rates if rate is not None), default=None)


@check(
    "clocks",
    "the clocks of all machines agree",
    needs=lambda examined: len(examined.measured.clocks) > 1,
)
def clocks(examined: Examined) -> Iterator[DoctorFinding]:
    """Check each rank's clock offset, minus the uncertainty of its estimate."""
    for clock in examined.measured.clocks:
        # A long round trip makes the offset uncertain; report only the part beyond the uncertainty.
        excess = abs(clock.offset_s) - clock.uncertainty_s
        if excess < WARNS_S:
            continue
        recording = examined.ranks[clock.rank]
        report = failure if excess >= FAILS_S else warning
        side = "ahead of" if clock.offset_s > 0 else "behind"
        yield report(
            recording,
            "clock",
            what=f"it is {abs(clock.offset_s):.3g} s {side} rank 0's (to within"
            f" {clock.uncertainty_s * 1e3:.2g} ms)",
            why="logs and traces of the ranks do not line up, files on a network folder seem to"
            " come from the future, and certificates fail",
            remedy="start chronyd or systemd-timesyncd with the same server on all machines, and"
            " check with chronyc tracking",
        )


@check(
    "output-folder",
    "all ranks see the folder of the run and write it fast enough",
    needs=lambda examined: bool(examined.measured.folders),
)
def output_folder(examined: Examined) -> Iterator[DoctorFinding]:
    """Check the measurements of each rank."""
    for folder in examined.measured.folders:
        yield from _folder_findings(examined.ranks[folder.rank], folder)


def _folder_findings(recording: MachineRecording, folder: Folder) -> Iterator[DoctorFinding]:
    if folder.problem:
        yield failure(
            recording,
            folder.path,
            what=f"it cannot be written: {folder.problem}",
            why="checkpoints and logs go there",
            remedy="use another --output-dir, or create it for this user on this machine",
        )
    if folder.shared is False:
        yield failure(
            recording,
            folder.path,
            what="this rank does not see the file that rank 0 wrote there",
            why="each rank writes its part of a checkpoint; with separate folders no machine has a"
            " complete one",
            remedy="mount the same network folder on all machines, under the same path",
        )
    rate = folder.write_mb_per_s
    if rate is None or rate >= WARNS_MB_PER_S:
        return
    report = failure if rate < FAILS_MB_PER_S else warning
    minutes = EXAMPLE_PARAMETERS * BYTES_PER_PARAMETER / (rate * 1e6) / 60
    yield report(
        recording,
        folder.path,
        what=f"one process writes {rate:.0f} MB/s there",
        why=f"a checkpoint of 7 billion parameters with Adam takes one process {minutes:.0f}"
        " minutes",
        remedy="use a local disk or a parallel file system, and check for other writers",
    )

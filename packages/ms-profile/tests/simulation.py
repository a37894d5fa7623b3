"""Simulated runs with one injected fault, as traces with per-rank clocks: truth for the ledger.

Ranks step like DDP on a CPU backend: wait for data, forward, backward in buckets that each start a
collective on a separate thread, wait for all of them, then the optimizer. In a grid, rows of ranks
also communicate in the forward pass, like tensor-parallel groups.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from attrs import field, frozen
from attrs.validators import ge
from msgspec import Raw
from numpy.typing import NDArray

from ms_profile.trace.builder import TraceBuilder
from ms_profile.trace.columns import Trace
from ms_profile.trace.intervals import Intervals, union
from ms_profile.trace.records import Arguments, TraceEvent

__all__ = ["Fault", "SimulatedRun", "simulate_run"]

MS = 1_000_000
BUCKETS = 4
EPOCH_NS = 1_800_000_000 * 1_000_000_000


@frozen(kw_only=True)
class Fault:
    """A fault on one rank."""

    phase: Literal["data", "compute", "garbage", "host", "link"]
    rank: int
    delay_ns: int = field(validator=ge(0))
    every: int = 1
    """The fault occurs in every n-th step."""


@frozen(kw_only=True, eq=False)
class SimulatedRun:
    """Traces as the ranks would have written them, and the simulated parameters."""

    traces: dict[int, Trace]
    garbage: dict[int, Intervals]
    """Garbage collections of each rank, on its own clock."""
    offsets_ns: tuple[float, ...]
    drifts: tuple[float, ...]
    origin_ns: int
    """Time on the true clock at which the offsets hold."""


class _Rank:
    """One rank's records during the simulation, in true time."""

    def __init__(self, rank: int, now: float) -> None:
        self.rank = rank
        self.now = now
        self.free = now
        self.spans: list[tuple[str, str, int, float, float, int]] = []
        self.garbage: list[tuple[float, float]] = []

    def do(self, name: str, label: str, length: float) -> None:
        self.spans.append((name, label, 0, self.now, length, 0))
        self.now += length


def simulate_run(
    *,
    ranks: int = 4,
    steps: int = 12,
    fault: Fault | None = None,
    grid: int = 0,
    offsets_ns: Sequence[float] | None = None,
    drifts: Sequence[float] | None = None,
    noise: float = 0.03,
    late_ns: float = 20_000.0,
    seed: int = 0,
) -> SimulatedRun:
    """Simulate a run.

    Args:
        ranks: number of ranks.
        steps: number of steps of about 40 ms each.
        fault: fault to inject.
        grid: ranks per row, which communicate separately in each forward pass; 0 for none.
        offsets_ns: offset of each rank's clock from the true one.
        drifts: seconds that each clock gains per second.
        noise: relative standard deviation of every duration.
        late_ns: mean of the exponential delay with which ranks see a collective's end.
        seed: random seed.
    """
    random = np.random.default_rng(seed)
    simulated = [_Rank(rank, 0.0) for rank in range(ranks)]
    for rank in simulated:
        rank.now = float(random.uniform(0, MS))
    for step in range(steps):
        struck = fault if fault is not None and step % fault.every == 0 else None
        _step(simulated, step, struck, grid, noise, late_ns, random)
    offsets = tuple(offsets_ns) if offsets_ns is not None else (0.0,) * ranks
    rates = tuple(drifts) if drifts is not None else (0.0,) * ranks
    garbage = {}
    traces = {}
    for rank in simulated:
        traces[rank.rank] = _trace(rank, ranks, offsets[rank.rank], rates[rank.rank])
        spans = np.array(rank.garbage, np.float64).reshape(-1, 2)
        read = _clock(spans, offsets[rank.rank], rates[rank.rank])
        garbage[rank.rank] = union(read[:, 0], read[:, 1])
    return SimulatedRun(
        traces=traces, garbage=garbage, offsets_ns=offsets, drifts=rates, origin_ns=EPOCH_NS
    )


def _step(
    ranks: list[_Rank],
    step: int,
    fault: Fault | None,
    grid: int,
    noise: float,
    late_ns: float,
    random: np.random.Generator,
) -> None:
    def length(mean_ms: float) -> float:
        return mean_ms * MS * max(0.1, float(random.normal(1.0, noise)))

    step_starts = {rank.rank: rank.now for rank in ranks}
    for rank in ranks:
        delay_ns = fault.delay_ns if fault is not None and fault.rank == rank.rank else 0
        phase = fault.phase if fault is not None else ""
        name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        rank.do(name, "user_annotation", length(0.3) + delay_ns * (phase == "data"))
        rank.now += length(0.5) + delay_ns * (phase == "host")
        rank.do("aten::mm", "cpu_op", length(4.0) + delay_ns * (phase == "compute"))
        if phase == "garbage" and delay_ns:
            rank.garbage.append((rank.now, rank.now + delay_ns))
            rank.now += delay_ns
    if grid:
        for first in range(0, len(ranks), grid):
            _collective(
                ranks[first : first + grid], "gloo:all_gather", 65536, 0.5, fault, late_ns, random
            )
        for rank in ranks:
            rank.now = max(rank.now, rank.free)
            rank.do("aten::addmm", "cpu_op", length(3.0))
    for _ in range(BUCKETS):
        for rank in ranks:
            rank.do("aten::bmm", "cpu_op", length(3.0))
        _collective(ranks, "gloo:all_reduce", 262144, 2.0, fault, late_ns, random)
    for rank in ranks:
        rank.now = max(rank.now, rank.free)
        rank.do("aten::_foreach_add_", "cpu_op", length(2.0))
        start = step_starts[rank.rank]
        rank.spans.append(
            (f"ProfilerStep#{step}", "user_annotation", 0, start, rank.now - start, 0)
        )


def _collective(
    ranks: list[_Rank],
    name: str,
    elements: int,
    transfer_ms: float,
    fault: Fault | None,
    late_ns: float,
    random: np.random.Generator,
) -> None:
    """Simulate one collective on each rank's communication thread, after its previous one."""
    starts = [max(rank.now, rank.free) for rank in ranks]
    transfer = transfer_ms * MS * max(0.3, float(random.normal(1.0, 0.05)))
    if fault is not None and fault.phase == "link" and fault.rank in [r.rank for r in ranks]:
        transfer += fault.delay_ns
    end = max(starts) + transfer
    for rank, start in zip(ranks, starts, strict=True):
        seen = end + float(random.exponential(late_ns))
        rank.spans.append((name, "user_annotation", 1, start, seen - start, elements))
        rank.free = seen


def _clock(instants: NDArray[np.float64], offset: float, drift: float) -> NDArray[np.int64]:
    return np.rint(instants + offset + drift * instants).astype(np.int64) + EPOCH_NS


def _trace(rank: _Rank, ranks: int, offset: float, drift: float) -> Trace:
    builder = TraceBuilder()
    records = []
    for name, label, thread, start, length, elements in rank.spans:
        edges = np.rint(np.array([start, start + length]) * (1 + drift) + offset)
        arguments = Arguments()
        if elements:
            arguments = Arguments(dims=Raw(b"[[%d]]" % elements), types=Raw(b'["float"]'))
        records.append(
            TraceEvent(
                ph="X", name=name, cat=label, pid=rank.rank, tid=thread, ts=float(edges[0]) / 1e3,
                dur=float(edges[1] - edges[0]) / 1e3, args=arguments,
            )
        )  # fmt: skip
    builder.add(records)
    distributed_info = {"rank": rank.rank, "world_size": ranks}
    return builder.finish(
        {"baseTimeNanoseconds": EPOCH_NS, "distributedInfo": distributed_info}, (), 0
    )

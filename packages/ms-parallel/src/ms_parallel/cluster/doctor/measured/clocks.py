"""Compares the clocks of all ranks with that of rank 0, each over its shortest round trip.

A rank sends when its clock says a, rank 0 answers with what its own says, and the rank hears that
at b. As the answer is given somewhere between, the clocks differ by (a + b) / 2 less the answer, to
within (b - a) / 2 (D. L. Mills, RFC 958, without the other's two times, which lie together here).
"""

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ms_parallel.cluster.doctor.measured.exchange import receive_numbers, send_numbers
from ms_parallel.cluster.doctor.recording.recording import Clock

TRIPS = 16


def measure_clocks(now: Callable[[], float] = time.time) -> list[Clock]:
    """Measure the clock of each rank; all ranks call this, and rank 0 gets the result.

    Args:
        now: the time of this rank, in seconds.
    """
    own, world = dist.get_rank(), dist.get_world_size()
    clocks = [Clock(rank=0, offset_s=0.0, uncertainty_s=0.0)]
    for other in range(1, world):
        if own == other:
            trips = [_ask(now) for _ in range(TRIPS)]
            offset, uncertainty = estimate(trips)
            send_numbers(offset, uncertainty, to=0)
        elif own == 0:
            for _ in range(TRIPS):
                receive_numbers(1, source=other)
                send_numbers(now(), to=other)
            offset, uncertainty = receive_numbers(2, source=other)
            clocks.append(Clock(rank=other, offset_s=offset, uncertainty_s=uncertainty))
    return clocks if own == 0 else []


def estimate(trips: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Estimate how far a clock is ahead, and how exactly that is known, both in seconds.

    Args:
        trips: when a question left, what the other's clock said, and when its answer came.
    """
    left, said, came = min(trips, key=lambda trip: trip[2] - trip[0])
    return (left + came) / 2 - said, (came - left) / 2


def _ask(now: Callable[[], float]) -> tuple[float, float, float]:
    left = now()
    send_numbers(left, to=0)
    (said,) = receive_numbers(1, source=0)
    return left, said, now()

"""Compare the clocks of all ranks with rank 0's, each by its shortest round trip.

A rank sends at its time a, rank 0 replies with its own time, and the rank receives the reply at b.
As the reply was sent in between, the offset is (a + b) / 2 minus the reply, to within (b - a) / 2
(D. L. Mills, RFC 958, with rank 0's receive and send times taken as equal).
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ms_profile.doctor.recording import Clock

ROUND_TRIPS = 16


def measure_clocks(clock: Callable[[], float] = time.time) -> list[Clock]:
    """Measure the clock offset of each rank. Collective; rank 0 gets the result.

    Args:
        clock: returns this rank's time in seconds.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    clocks = [Clock(rank=0, offset_s=0.0, uncertainty_s=0.0)]
    for peer in range(1, world):
        if rank == peer:
            round_trips = [_round_trip(clock) for _ in range(ROUND_TRIPS)]
            offset, uncertainty = estimate(round_trips)
            _send(offset, uncertainty, to=0)
        elif rank == 0:
            for _ in range(ROUND_TRIPS):
                _receive(1, source=peer)
                _send(clock(), to=peer)
            offset, uncertainty = _receive(2, source=peer)
            clocks.append(Clock(rank=peer, offset_s=offset, uncertainty_s=uncertainty))
    return clocks if rank == 0 else []


def estimate(round_trips: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Estimate the offset of a clock and the uncertainty, both in seconds.

    Args:
        round_trips: (send time, remote time, receive time) of each.
    """
    # The shortest round trip has the smallest uncertainty; an average would include delayed ones.
    sent, remote, received = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return (sent + received) / 2 - remote, (received - sent) / 2


def _round_trip(clock: Callable[[], float]) -> tuple[float, float, float]:
    sent = clock()
    _send(sent, to=0)
    (remote,) = _receive(1, source=0)
    return sent, remote, clock()


def _send(*values: float, to: int) -> None:
    dist.send(torch.tensor(values, dtype=torch.float64), dst=to)


def _receive(count: int, *, source: int) -> list[float]:
    buffer = torch.zeros(count, dtype=torch.float64)
    dist.recv(buffer, src=source)
    return [float(value) for value in buffer]


def gather_bytes(content: bytes) -> list[bytes]:
    """Gather bytes of any length from all ranks on rank 0; [] on other ranks.

    Ranks send one after the other, as some have the files of a machine to send and most have not.
    """
    # Sizes first, as the receiver must allocate its buffers.
    size = torch.tensor([len(content)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    if dist.get_rank() > 0:
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=0)
        return []
    parts = [content]
    for peer, length in list(enumerate(map(int, sizes)))[1:]:
        buffer = torch.zeros(length, dtype=torch.uint8)
        if length:
            dist.recv(buffer, src=peer)
        parts.append(buffer.numpy().tobytes())
    return parts

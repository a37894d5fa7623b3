"""Sends messages between every pair of ranks, over the backend that a run would use."""

import time
from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.cluster.doctor.measured.exchange import gather_bytes
from ms_parallel.cluster.doctor.recording.recording import Pair

SMALL_BYTES, LARGE_BYTES = 8, 16 << 20
SMALL_TRIPS, LARGE_TRIPS = 32, 3
WARM_TRIPS = 2
MOST_ROUNDS = 64
ONE_BY_ONE = 8
"""Most ranks whose pairs are measured one after the other; more send at the same time."""


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """List every pair once, in rounds in which each rank has at most one partner.

    Args:
        world: number of ranks. Up to `ONE_BY_ONE` of them have one pair a round; beyond
            `MOST_ROUNDS`, each has as many partners.
    """
    ranks: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    found = []
    for _ in range(min(len(ranks) - 1, MOST_ROUNDS)):
        half = len(ranks) // 2
        paired = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        found.append([(min(p), max(p)) for p in paired if None not in p])  # type: ignore[type-var]
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    pairs: list[list[tuple[int, int]]] = found  # type: ignore[assignment]
    return [[pair] for each in pairs for pair in each] if world <= ONE_BY_ONE else pairs


def measure_pairs(
    device: torch.device, begin: Callable[[list[tuple[int, int]]], object] = lambda pairs: None
) -> tuple[list[Pair], bool]:
    """Latency and bandwidth of each pair; all ranks call this, and rank 0 gets the result.

    Args:
        device: where this rank's messages lie.
        begin: called with the pairs that come next.

    Returns:
        The pairs, and whether several sent at the same time.
    """
    own, found = dist.get_rank(), []
    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    table = rounds(dist.get_world_size())
    for each in table:
        begin(each)
        dist.barrier()
        for first, second in each:
            if own in (first, second):
                latency_s = one_way(small, first, second, SMALL_TRIPS)
                moving_s = one_way(large, first, second, LARGE_TRIPS)
                if own == first:
                    found.append(_pair(first, second, latency_s, moving_s))
    parts = gather_bytes(msgspec.json.encode(found))
    pairs = [pair for part in parts for pair in msgspec.json.decode(part, type=list[Pair])]
    return sorted(pairs, key=lambda pair: (pair.first, pair.second)), any(
        len(each) > 1 for each in table
    )


def _pair(first: int, second: int, latency_s: float, moving_s: float) -> Pair:
    return Pair(
        first=first,
        second=second,
        latency_us=latency_s * 1e6,
        bandwidth_gb_per_s=LARGE_BYTES / moving_s / 1e9,
    )


def one_way(message: torch.Tensor, first: int, second: int, trips: int) -> float:
    """Seconds that a message takes between two ranks: half of the shortest of some round trips.

    Both ranks call this; what the second one gets is of no use.
    """
    return min(list(_trips(message, first, second, trips + WARM_TRIPS))[WARM_TRIPS:]) / 2


def _trips(message: torch.Tensor, first: int, second: int, trips: int) -> Iterator[float]:
    leads = dist.get_rank() == first
    for _ in range(trips):
        began = time.perf_counter()
        if leads:
            dist.send(message, dst=second)
            dist.recv(message, src=second)
        else:
            dist.recv(message, src=first)
            dist.send(message, dst=first)
        if message.device.type != "cpu":
            torch.accelerator.synchronize(message.device)
        yield time.perf_counter() - began

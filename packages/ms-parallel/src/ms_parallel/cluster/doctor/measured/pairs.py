"""Measures messages between every pair of ranks, over the backend of a run."""

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
MAX_ROUNDS = 64
MAX_SEQUENTIAL = 8
"""Maximum number of ranks whose pairs are measured one at a time; more measure in parallel."""


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """Arrange all pairs in rounds in which each rank has at most one partner.

    Args:
        world: number of ranks. Up to `MAX_SEQUENTIAL` ranks have one pair per round; beyond
            `MAX_ROUNDS`, each rank has that many partners.
    """
    ranks: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    schedule = []
    for _ in range(min(len(ranks) - 1, MAX_ROUNDS)):
        half = len(ranks) // 2
        paired = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        schedule.append([(min(p), max(p)) for p in paired if None not in p])  # type: ignore[type-var]
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    pairs: list[list[tuple[int, int]]] = schedule  # type: ignore[assignment]
    return (
        [[pair] for pairs_of_round in pairs for pair in pairs_of_round]
        if world <= MAX_SEQUENTIAL
        else pairs
    )


def measure_pairs(
    device: torch.device, begin: Callable[[list[tuple[int, int]]], object] = lambda pairs: None
) -> tuple[list[Pair], bool]:
    """Measure latency and bandwidth of each pair. Collective; rank 0 gets the result.

    Args:
        device: device for this rank's messages.
        begin: called with the next pairs.

    Returns:
        The pairs, and whether several were measured at the same time.
    """
    rank, results = dist.get_rank(), []
    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    table = rounds(dist.get_world_size())
    for round_pairs in table:
        begin(round_pairs)
        dist.barrier()
        for first, second in round_pairs:
            if rank in (first, second):
                latency_s = one_way(small, first, second, SMALL_TRIPS)
                transfer_s = one_way(large, first, second, LARGE_TRIPS)
                if rank == first:
                    results.append(_pair(first, second, latency_s, transfer_s))
    parts = gather_bytes(msgspec.json.encode(results))
    pairs = [pair for part in parts for pair in msgspec.json.decode(part, type=list[Pair])]
    return sorted(pairs, key=lambda pair: (pair.first, pair.second)), any(
        len(round_pairs) > 1 for round_pairs in table
    )


def _pair(first: int, second: int, latency_s: float, transfer_s: float) -> Pair:
    return Pair(
        first=first,
        second=second,
        latency_us=latency_s * 1e6,
        bandwidth_gb_per_s=LARGE_BYTES / transfer_s / 1e9,
    )


def one_way(message: torch.Tensor, first: int, second: int, trips: int) -> float:
    """Seconds of a message between two ranks: half of the shortest round trip.

    Both ranks call this; only the first rank's result is meaningful.
    """
    return min(list(_trips(message, first, second, trips + WARM_TRIPS))[WARM_TRIPS:]) / 2


def _trips(message: torch.Tensor, first: int, second: int, trips: int) -> Iterator[float]:
    leads = dist.get_rank() == first
    for _ in range(trips):
        started = time.perf_counter()
        if leads:
            dist.send(message, dst=second)
            dist.recv(message, src=second)
        else:
            dist.recv(message, src=first)
            dist.send(message, dst=first)
        if message.device.type != "cpu":
            torch.accelerator.synchronize(message.device)
        yield time.perf_counter() - started

"""Measure the link of every pair of ranks by ping-pong.

One pair at a time sends messages of increasing size back and forth. Other load on the host only
adds time, so the fastest repeat is used. The line is fitted by ratios, so that 8 bytes and 4 MiB
count equally. Needs torch.
"""

import socket
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

from ms_profile.errors import LinkError
from ms_profile.links.fit import fit_link
from ms_profile.links.matrix import LinkMatrix, PairLink

if TYPE_CHECKING:
    import torch

SIZES: Final = (8, 1024, 16_384, 131_072, 1_048_576, 4_194_304)
WARMUP: Final = 2
"""Untimed round trips per size: the first ones open connections and fill caches."""
Pairs = Sequence[tuple[int, int]]


def measure_links(
    *,
    sizes_bytes: Sequence[int] = SIZES,
    repeats: int | Sequence[int] = 10,
    device: "torch.device | None" = None,
    rounds: Sequence[Pairs] | None = None,
    on_round: Callable[[Pairs], object] = lambda pairs: None,
) -> LinkMatrix:
    """Measure every pair of the default process group; a collective call on all ranks.

    Args:
        sizes_bytes: message sizes, multiples of 8.
        repeats: round trips, one number or one per size; the fastest is used.
        device: device of the messages. None: the accelerator if the backend needs it, else the CPU.
        rounds: pairs to measure, lower rank first; the pairs of a round run at the same time.
            None: all pairs, one after the other.
        on_round: called with the pairs of each round before it starts.

    Raises:
        LinkError: torch.distributed is not initialized, or there is only one rank.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise LinkError(
            "link needs at least two ranks; run under torchrun, or pass --nproc-per-node"
        )
    message_device = device if device is not None else _device(dist.get_backend_config())
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = [repeats] * len(sizes_bytes) if isinstance(repeats, int) else repeats
    pairs: list[PairLink] = []
    for round_pairs in rounds or [[pair] for pair in combinations(range(world), 2)]:
        on_round(round_pairs)
        # Messages of an earlier round would share the links with this one's.
        dist.barrier()
        for first, second in round_pairs:
            if rank not in (first, second):
                continue
            peer = second if rank == first else first
            times = [
                one_way(peer, size, count, message_device)
                for size, count in zip(sizes_bytes, counts, strict=True)
            ]
            if rank == first:
                pair = PairLink(
                    first=first,
                    second=second,
                    fit=fit_link(sizes_bytes, times),
                    sizes_bytes=tuple(sizes_bytes),
                    times_s=tuple(times),
                )
                pairs.append(pair)
    dist.barrier()
    gathered: list[tuple[str, list[PairLink]]] = [("", [])] * world
    dist.all_gather_object(gathered, (socket.gethostname(), pairs))
    return LinkMatrix(
        world_size=world,
        backend=str(dist.get_backend()),
        hosts=tuple(host for host, _ in gathered),
        pairs=tuple(pair for _, local_pairs in gathered for pair in local_pairs),
    )


def _device(backends: str) -> "torch.device":
    """Return the device of messages for backends such as `cpu:gloo,cuda:nccl`."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    by_device = dict(entry.split(":") for entry in backends.split(","))
    if accelerator is None or by_device.get(accelerator.type, "gloo") == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def one_way(peer: int, size_bytes: int, repeats: int, device: "torch.device") -> float:
    """Return half the fastest round trip to `peer` in seconds; both ranks call this.

    The lower rank sends first, and only its result is meaningful.
    """
    import torch
    import torch.distributed as dist

    message = torch.zeros(max(size_bytes // 8, 1), dtype=torch.int64, device=device)
    sends_first = dist.get_rank() < peer
    best = float("inf")
    for trip in range(repeats + WARMUP):
        start = time.perf_counter()
        if sends_first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        if device.type != "cpu":
            # On a device, send and recv return once the transfer is queued.
            torch.accelerator.synchronize(device)
        if trip >= WARMUP:
            best = min(best, time.perf_counter() - start)
    return best / 2

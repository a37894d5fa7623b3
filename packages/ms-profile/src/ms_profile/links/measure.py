"""Measure the link of every pair of ranks by ping-pong.

For each pair in turn, alone on the network, messages of growing size go there and back; of the
repeats the fastest counts, for whatever else the host does only adds. The line is fitted to them
with relative weights, so that 8 bytes and 4 MiB count alike. Needs torch.
"""

import socket
import time
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Final

from ms_profile.errors import LinkError
from ms_profile.links.fit import fit_link
from ms_profile.links.matrix import LinkMatrix, PairLink

if TYPE_CHECKING:
    import torch

SIZES: Final = (8, 1024, 16_384, 131_072, 1_048_576, 4_194_304)


def measure_links(
    *, sizes_bytes: Sequence[int] = SIZES, repeats: int = 10, device: "torch.device | None" = None
) -> LinkMatrix:
    """Measure every pair of the default process group; call it on all ranks.

    Args:
        sizes_bytes: message sizes, multiples of 8.
        repeats: round trips a size; the fastest counts.
        device: where the messages lie; the accelerator for backends that need it, else the CPU.

    Raises:
        LinkError: torch.distributed is not initialised, or there is one rank alone.
    """
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise LinkError(
            "links need at least two ranks; run under torchrun, or give --nproc-per-node"
        )
    place = device if device is not None else _device(dist.get_backend_config())
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs: list[PairLink] = []
    for first, second in combinations(range(world), 2):
        if rank in (first, second):
            times = [_one_way(first, second, size, repeats, place) for size in sizes_bytes]
            if rank == first:
                fit = fit_link(sizes_bytes, times)
                pair = PairLink(
                    first=first,
                    second=second,
                    fit=fit,
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
        pairs=tuple(pair for _, own in gathered for pair in own),
    )


def _device(backends: str) -> "torch.device":
    """Return where messages lie under backends such as `cpu:gloo,cuda:nccl`."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    by_device = dict(each.split(":") for each in backends.split(","))
    if accelerator is None or by_device.get(accelerator.type, "gloo") == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _one_way(first: int, second: int, size: int, repeats: int, device: "torch.device") -> float:
    """Return half the fastest round trip, in seconds; the second rank's answer means nothing."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(max(size // 8, 1), dtype=torch.int64, device=device)
    leading = dist.get_rank() == first
    other = second if leading else first
    best = float("inf")
    for _ in range(repeats + 2):  # the first two open connections and fill caches
        start = time.perf_counter()
        if leading:
            dist.send(message, other)
            dist.recv(message, other)
        else:
            dist.recv(message, other)
            dist.send(message, other)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best / 2

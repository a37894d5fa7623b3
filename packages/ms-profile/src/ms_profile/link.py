"""Latency and bandwidth between every pair of ranks, by ping-pong.

A message of n bytes takes `latency + n / bandwidth` (the alpha-beta model). For each pair in turn,
alone on the network, messages of growing size go there and back; of the repeats the fastest counts,
for whatever else the host does only adds. The line is fitted to them with relative weights, so that
8 bytes and 4 MiB count alike. Needs torch.
"""

import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from ms_profile.errors import FormatError, LinkError
from ms_profile.files.untrusted import read_json

if TYPE_CHECKING:
    import torch

__all__ = ["LinkFit", "LinkMatrix", "PairLink", "fit_link", "measure_links", "read_links"]

SIZES: Final = (8, 1024, 16_384, 131_072, 1_048_576, 4_194_304)
MOST_RANKS: Final = 4096
LONGEST_S: Final = 1e6
Floats = NDArray[np.float64]


class LinkFit(Struct, frozen=True, kw_only=True):
    """The line through times against sizes."""

    latency_s: float
    """Alpha: seconds that a message of no bytes takes one way."""
    bandwidth_bytes_per_s: float | None
    """Beta: bytes a second; None where time did not grow with size, so that it cannot be told."""
    residual: float
    """Root mean square of (measured - fitted) / measured."""


class PairLink(Struct, frozen=True, kw_only=True):
    """One pair's link, as measured from the lower rank."""

    first: int
    second: int
    fit: LinkFit
    sizes_bytes: tuple[int, ...]
    times_s: tuple[float, ...]
    """The fastest one-way time of each size: half of there and back."""


class LinkMatrix(Struct, frozen=True, kw_only=True, tag="ms-profile.links.1", tag_field="format"):
    """Every pair's link."""

    world_size: int
    backend: str
    hosts: tuple[str, ...]
    """Of each rank."""
    pairs: tuple[PairLink, ...]

    def __post_init__(self) -> None:
        """Hold the parts against one another, of a file that somebody wrote.

        Raises:
            ValueError: they do not fit together.
        """
        if not 2 <= self.world_size <= MOST_RANKS or len(self.hosts) != self.world_size:
            raise ValueError(f"{len(self.hosts)} hosts of {self.world_size} ranks")
        for pair in self.pairs:
            if not 0 <= pair.first < pair.second < self.world_size:
                raise ValueError(f"a link of ranks {pair.first} and {pair.second}")
            if not pair.times_s or len(pair.times_s) != len(pair.sizes_bytes):
                raise ValueError(f"{len(pair.times_s)} times of {len(pair.sizes_bytes)} sizes")
            if not all(0 < time_s < LONGEST_S for time_s in pair.times_s):
                raise ValueError(f"times {pair.times_s} of ranks {pair.first} and {pair.second}")


def read_links(path: Path | str) -> LinkMatrix:
    """Read what `ms-profile link --out` wrote.

    Raises:
        FormatError: it is no such file, or is damaged.
    """
    return read_json(path, LinkMatrix, error=FormatError)


def fit_link(sizes_bytes: ArrayLike, times_s: ArrayLike) -> LinkFit:
    """Fit `time = latency + size / bandwidth`, errors taken as relative to the time.

    Args:
        sizes_bytes: (N,) message sizes.
        times_s: (N,) one-way times, positive.

    Raises:
        LinkError: fewer than two different sizes, or a time that is not positive.
    """
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    times = np.asarray(times_s, dtype=np.float64)
    if len(np.unique(sizes)) < 2 or not (times > 0).all():
        raise LinkError(
            f"sizes {sizes.tolist()} and times {times.tolist()} make no line; "
            "give two different sizes and positive times"
        )
    scale = sizes.max()
    columns = np.stack([np.ones_like(sizes), sizes / scale], axis=1) / times[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if latency < 0:  # a pure bandwidth then: the best line through the origin
        latency = 0.0
        slope = float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    if slope <= 0:
        latency, slope = float(np.median(times)), 0.0
    fitted = latency + slope * sizes / scale
    return LinkFit(
        latency_s=float(latency),
        bandwidth_bytes_per_s=float(scale / slope) if slope > 0 else None,
        residual=float(np.sqrt(np.mean(((times - fitted) / times) ** 2))),
    )


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
    import socket

    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise LinkError(
            "links need at least two ranks; run under torchrun, or give --nproc-per-node"
        )
    place = device if device is not None else _device(dist.get_backend())
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


def _device(backend: str) -> "torch.device":
    import torch

    accelerator = torch.accelerator.current_accelerator()
    if "gloo" in backend or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _one_way(first: int, second: int, size: int, repeats: int, device: "torch.device") -> float:
    """Half the fastest round trip, in seconds; on the second rank the answer means nothing."""
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

"""Messages between the ranks of a doctor, over whatever torch.distributed carries for the CPU."""

from typing import Any

import torch
import torch.distributed as dist


def gather_bytes(content: bytes) -> list[bytes]:
    """Gather what each rank gives, by rank, on rank 0; return nothing on the others.

    One rank sends after the other, each no more than it has: some have a machine's files to give,
    and most have not.
    """
    size = torch.tensor([len(content)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    if dist.get_rank() > 0:
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), dst=0)
        return []
    parts = [content]
    for other, length in list(enumerate(map(int, sizes)))[1:]:
        taken = torch.zeros(length, dtype=torch.uint8)
        if length:
            dist.recv(taken, src=other)
        parts.append(taken.numpy().tobytes())
    return parts


def send_numbers(*values: float, to: int) -> None:
    """Send some float64."""
    dist.send(torch.tensor(values, dtype=torch.float64), dst=to)


def receive_numbers(count: int, *, source: int) -> list[float]:
    """Receive as many float64."""
    taken: Any = torch.zeros(count, dtype=torch.float64)
    dist.recv(taken, src=source)
    values: list[float] = taken.tolist()
    return values

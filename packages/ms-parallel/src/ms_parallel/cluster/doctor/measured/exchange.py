"""Messages between ranks over torch.distributed's CPU backend."""

from typing import Any

import torch
import torch.distributed as dist


def gather_bytes(content: bytes) -> list[bytes]:
    """Gather bytes of any length from all ranks on rank 0; [] on other ranks.

    Ranks send one after the other, as some have the files of a machine to send and most have not.
    """
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


def send_numbers(*values: float, to: int) -> None:
    """Send float64 numbers to rank `to`."""
    dist.send(torch.tensor(values, dtype=torch.float64), dst=to)


def receive_numbers(count: int, *, source: int) -> list[float]:
    """Receive `count` float64 numbers from rank `source`."""
    buffer: Any = torch.zeros(count, dtype=torch.float64)
    dist.recv(buffer, src=source)
    values: list[float] = buffer.tolist()
    return values

"""Copies between the host and a device that do not make the host wait for queued work."""

import torch
from torch import Tensor


class HostCopy:
    """Device tensors on their way to the host.

    The copies are queued behind the work that computes the tensors. `wait` waits for them, but not
    for work that was queued later, such as the optimizer's.

    Args:
        tensors: tensors of one device.
    """

    def __init__(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        self.copied: torch.Event | None = None
        if device.type == "cpu":
            self.tensors = tensors
            return
        # Pinned memory, as copies to pageable memory are synchronous.
        self.tensors = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        )
        self.copied = torch.Event(device)
        self.copied.record()

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the copies and return the tensors on the CPU."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.tensors


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; a plain `tensor.to(device)` would wait for queued work."""
    # Compiled code, and devices that this machine does not have, have no queued work to wait for.
    if (
        device.type in ("cpu", "meta")
        or torch.compiler.is_compiling()
        or not torch.accelerator.is_available()
    ):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)

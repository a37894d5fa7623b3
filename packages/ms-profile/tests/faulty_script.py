"""Data-parallel training in which one rank is slow, for a known reason, in each window.

Arguments: steps before the first window, steps per window, steps between window starts, and then
one case per window as `rank:phase:milliseconds`.
"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

skip, length, window_interval = map(int, sys.argv[1:4])
cases = [
    (int(rank), phase, float(delay_ms) / 1e3)
    for rank, phase, delay_ms in (case.split(":") for case in sys.argv[4:])
]
steps = skip + window_interval * len(cases)


def fault_of(step: int) -> tuple[str, float]:
    """Return phase and duration (s) of this rank's fault in a step."""
    number, within = divmod(step - skip, window_interval)
    if step < skip or within >= length:
        return "none", 0.0
    rank, phase, delay_s = cases[number]
    return (phase, delay_s) if rank == dist.get_rank() else ("none", 0.0)


class Samples(Dataset[torch.Tensor]):
    """Rows that are delayed in steps with a data fault."""

    def __len__(self) -> int:
        return steps * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        # A step's batch is fetched at the end of the previous step, as counted by the profiler.
        phase, delay_s = fault_of(index // 4 - 1)
        if phase == "data" and index % 4 == 0:
            time.sleep(delay_s)
        return torch.ones(32)


class Net(nn.Module):
    """A small network whose forward pass can be slowed down."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        self.fault = ("none", 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, 32) to (B, 32)."""
        phase, delay_s = self.fault
        if phase == "compute":
            square = torch.ones(192, 192)
            end = time.perf_counter() + delay_s
            while time.perf_counter() < end:
                square = (square @ square).clamp(-1, 1)
        y: torch.Tensor = self.inner(x)
        return y


def main() -> None:
    """Train with the faults from the arguments."""
    dist.init_process_group("gloo")
    # Collections then examine only the objects below, and run only when requested.
    gc.freeze()
    garbage = [[number] for number in range(60_000)]
    gc.disable()
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step, batch in enumerate(DataLoader(Samples(), batch_size=4)):
        net.fault = fault_of(step)
        model(batch).square().mean().backward()
        phase, delay_s = net.fault
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter() + delay_s
        while phase == "garbage" and time.perf_counter() < end:
            gc.collect()
        if phase == "host":
            time.sleep(delay_s)
    assert garbage
    dist.barrier()
    time.sleep(0.2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

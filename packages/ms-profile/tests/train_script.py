"""A training script without any reference to ms-profile; the tests run it unmodified."""
# ruff: noqa: T201 - a script prints

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--parallel", choices=("none", "ddp", "fsdp"), default="none")
parser.add_argument("--end", choices=("well", "raise", "exit", "kill", "hang"), default="well")
parser.add_argument("--own-profiler", action="store_true")
parser.add_argument("--on-accelerator", action="store_true")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--pause-s", type=float, default=0.0)
options = parser.parse_args()
device = torch.device("cpu")
if options.on_accelerator:
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.accelerator.current_accelerator() or device


class Block(nn.Module):
    """Two layers, so that a block has inner modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(options.width, options.width)
        self.down = nn.Linear(options.width, options.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, W) to (B, W)."""
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, W) to (B, W)."""
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> nn.Module:
    """Build the model with the selected parallelism."""
    torch.manual_seed(0)
    model: nn.Module = Net().to(device)
    if options.parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif options.parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)
    return model


def train() -> None:
    """Train for the number of steps in the options."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = DataLoader(torch.randn(4 * options.steps, options.width), batch_size=4)  # type: ignore[arg-type]
    loss = torch.zeros(())
    for step, batch in enumerate(batches):
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.pause_s)
        if step == options.steps - 2:
            end_early()
    print(f"loss {loss.item():.9g}")


def end_early() -> None:
    """End as in the options, one step before the last."""
    if options.end == "raise":
        raise RuntimeError("the script fails here")
    if options.end == "exit":
        sys.exit(7)
    if options.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.end == "hang":
        print("hangs", flush=True)
        time.sleep(600)


if __name__ == "__main__":
    print("arguments", *sys.argv[1:])
    if options.parallel != "none":
        dist.init_process_group(dist.get_default_backend_for_device(device))
    if options.own_profiler:
        with torch.profiler.profile() as profiler:
            train()
        print("own profiler saw", len(profiler.key_averages()) > 5)
    else:
        train()
    if options.parallel != "none":
        # Ranks leave together; destroying a group while a peer still uses it aborts the process.
        dist.barrier()
        time.sleep(0.2)
        dist.destroy_process_group()

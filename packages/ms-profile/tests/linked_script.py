"""Training whose ranks exchange messages of several sizes in pairs, to show the links in a trace.

Arguments: steps; the operation, `all_reduce` or `broadcast` within pairs (0, 1), (2, 3), ..., or
`send` from each even rank to the next rank and back; and the elements of each message.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train a small model and exchange messages."""
    steps, operation = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
    pair, first = groups[rank // 2], rank // 2 * 2
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    messages = [torch.ones(size) for size in map(int, sys.argv[3:])]
    for _ in range(steps):
        model(torch.ones(16, 64)).square().mean().backward()
        for message in messages:
            if operation == "all_reduce":
                dist.all_reduce(message.clone(), group=pair)
            elif operation == "broadcast":
                dist.broadcast(message, src=first, group=pair)
            elif rank == first:
                dist.send(message, first + 1)
                dist.recv(message, first + 1)
            else:
                dist.recv(message, first)
                dist.send(message, first)
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

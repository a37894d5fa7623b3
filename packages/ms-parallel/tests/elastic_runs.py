"""Processes whose launchers count restarts differently, for `run_processes`."""

import os

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ms_parallel.cluster.connection import connect, disconnect
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.watch import position


def names_after_restarts(rounds: int) -> list[str]:
    """Connect several times over one store with a different restart count on each rank."""
    names = []
    for index in range(rounds):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["RANK"]) * index)
        connect(Layout(data=int(os.environ["WORLD_SIZE"])), device="cpu", timeout_s=60)
        total = torch.ones(())
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        names.append(position.start)
        disconnect()
    return names


def meet_after_dead_rank() -> str:
    """Connect after rank 0 has answered a request of a dead rank 1."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        store, _, _ = next(iter(rendezvous("env://", rank, 2)))
        store.set("ms-parallel/starts/asks-1", "of-the-dead")
        store.wait(["ms-parallel/starts/answer-of-the-dead"])
    return names_after_restarts(1)[0]

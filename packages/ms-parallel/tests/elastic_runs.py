"""Processes whose launchers count restarts otherwise; `run_processes` calls them."""

import os

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ms_parallel.cluster.connection import connect, disconnect
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.watch import position


def met_after_restarts(rounds: int) -> list[str]:
    """Meet again and again over one store, each time as if agents had counted otherwise."""
    names = []
    for number in range(rounds):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(int(os.environ["RANK"]) * number)
        connect(Layout(data=int(os.environ["WORLD_SIZE"])), device="cpu", timeout_s=60)
        total = torch.ones(())
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
        names.append(position.start)
        disconnect()
    return names


def leave_questions() -> str:
    """Meet where rank 0 has found, and answered, what a dead rank 1 had asked."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        store, _, _ = next(iter(rendezvous("env://", rank, 2)))
        store.set("ms-parallel/starts/asks-1", "of-the-dead")
        store.wait(["ms-parallel/starts/answer-of-the-dead"])
    return met_after_restarts(1)[0]

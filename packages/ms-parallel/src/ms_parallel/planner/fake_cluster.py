"""Processes of a layout that are not there, so that one process builds what one of them would."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ms_parallel.cluster.groups import Groups, lay_mesh
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.split.data_axis import Sharding
from ms_parallel.torch_private import fake_store

META = torch.device("meta")


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Let this process be the first of `size` while the block runs; the others are not there.

    Within it `fake_groups` lays each layout over the same processes, which takes less time than
    meeting anew for each.
    """
    assert not dist.is_initialized(), "this process has met others already"
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget: Callable[[], None] = _clear_sharding_prop_cache
        forget()  # layouts of groups that are no more


@contextmanager
def fake_groups(layout: Layout, device: torch.device = META) -> Iterator[Groups]:
    """Yield the groups of a layout's first process, whose collectives send nothing.

    Args:
        layout: of any number of processes; within `fake_world`, at most as many as that has.
        device: of what is built; on `meta` it has shapes and no memory.
    """
    if in_fake_world():
        yield evolve(lay_mesh(layout, torch.device("cpu")), device=device)
        return
    with fake_world(layout.world_size):
        yield evolve(lay_mesh(layout, torch.device("cpu")), device=device)


@contextmanager
def fake_pipeline(layout: Layout, sharding: Sharding) -> Iterator[list[Groups]]:
    """Yield the groups of the first process of each pipeline rank, laid as an engine lays them.

    An engine that has to lay them anew takes this process's own place, whatever it was given.

    Raises:
        LayoutError: the sharding contradicts the layout.
    """
    laid = sharded_layout(layout, sharding)
    stride = laid.world_size // laid.pipeline
    with fake_groups(laid) as groups:
        yield [evolve(groups, place=laid.place(rank * stride)) for rank in range(laid.pipeline)]


def in_fake_world() -> bool:
    """Return whether this process is in a fake world, whose other processes are not there."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def has_met_others() -> bool:
    """Return whether this process is one of a run, outside a fake world."""
    return dist.is_initialized() and not in_fake_world()

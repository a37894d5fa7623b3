"""Fake process groups, in which one process builds the engine of any rank of a layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ms_parallel.cluster.groups import Groups, create_groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.assembly import sharded_layout
from ms_parallel.memory.modes import Sharding
from ms_parallel.torch_private import fake_store

META = torch.device("meta")


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Make this process rank 0 of a fake world of `size` ranks inside the `with` block.

    `fake_groups` reuses the world for every layout, which is faster than initializing a process
    group for each.
    """
    assert not dist.is_initialized(), "torch.distributed is already initialized"
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_cache: Callable[[], None] = _clear_sharding_prop_cache
        clear_cache()  # it refers to the destroyed groups


@contextmanager
def fake_groups(layout: Layout, device: torch.device = META) -> Iterator[Groups]:
    """Yield the process groups of a layout's rank 0; their collectives return immediately.

    Args:
        layout: layout of any size; inside `fake_world`, at most the size of that world.
        device: device for tensors; on `meta` they take no memory.
    """
    if in_fake_world():
        # Groups are created for the CPU, and only tensors are on `device`.
        yield evolve(create_groups(layout, torch.device("cpu")), device=device)
        return
    with fake_world(layout.world_size):
        yield evolve(create_groups(layout, torch.device("cpu")), device=device)


@contextmanager
def fake_pipeline(layout: Layout, sharding: Sharding) -> Iterator[list[Groups]]:
    """Yield the process groups of the first rank of each pipeline stage, as an engine creates them.

    The sharded layout is applied here, since an engine that re-creates its groups would use this
    process's own position for every stage.

    Raises:
        LayoutError: the sharding contradicts the layout.
    """
    layout = sharded_layout(layout, sharding)
    # The pipeline is the outermost axis, so its stages start `stride` ranks apart.
    stride = layout.world_size // layout.pipeline
    with fake_groups(layout) as groups:
        yield [evolve(groups, place=layout.place(rank * stride)) for rank in range(layout.pipeline)]


def in_fake_world() -> bool:
    """Return whether this process is inside `fake_world`."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def in_process_group() -> bool:
    """Return whether this process is in a real process group."""
    return dist.is_initialized() and not in_fake_world()

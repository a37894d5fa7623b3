"""The processes of a layout: one device mesh with an axis for each way of splitting."""

import atexit
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from attrs import frozen
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ms_parallel.cluster.launch_line import launch_command
from ms_parallel.cluster.layout import Layout, Place
from ms_parallel.cluster.slurm import adopt_scheduler
from ms_parallel.errors import LaunchError

__all__ = ["AXES", "Groups", "backend_for", "connect", "disconnect", "pick_device"]

AXES = ("pipeline", "data", "context", "tensor")
SETTLE_S = 0.2


@frozen(kw_only=True)
class Groups:
    """One process's place among all, and the process groups along each axis."""

    layout: Layout
    place: Place
    device: torch.device
    mesh: DeviceMesh
    """Axes `pipeline`, `data`, `context`, `tensor`, outermost first."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes that differ from this one along `axis` alone."""
        return self.mesh.get_group(axis)

    def peer(self, axis: str, index: int) -> int:
        """Global rank of the process at `index` along `axis`, all other axes as here."""
        return dist.get_global_rank(self.group(axis), index)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        axis: str | None = None,
        op: dist.ReduceOp.RedOpType | None = None,
    ) -> torch.Tensor:
        """Sum (or `op`) `tensor` in place along `axis`, or over all processes."""
        size = self.layout.world_size if axis is None else self.mesh.size(AXES.index(axis))
        if size > 1:
            group = None if axis is None else self.group(axis)
            dist.all_reduce(tensor, op=op or dist.ReduceOp.SUM, group=group)
        return tensor


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """This process's device: `device` if given, else the accelerator of its local rank, else CPU.

    An accelerator is never invented: a process beyond the machine's devices is a `LaunchError`.
    """
    if device is not None and torch.device(device).type == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        if device is None:
            return torch.device("cpu")
        raise LaunchError(
            f"device {str(device)!r} was asked for but this machine has no accelerator; use 'cpu'"
        )
    index = None if device is None else torch.device(device).index
    index = int(os.environ.get("LOCAL_RANK", "0")) if index is None else index
    if index >= torch.accelerator.device_count():
        raise LaunchError(
            f"process {index} of this machine has no {found.type} of its own: "
            f"{torch.accelerator.device_count()} found; start fewer processes or use device 'cpu'"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)


def backend_for(device: torch.device) -> str:
    """What exchanges a device's tensors; beside an accelerator's own, gloo for those on the CPU."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def connect(
    layout: Layout, *, device: str | torch.device | None = None, timeout_s: float = 600.0
) -> Groups:
    """Join the processes that torchrun started (or be the only one) and lay the mesh over them.

    Args:
        layout: how the processes split the work; its world size must be the number started.
        device: `"cpu"`, an accelerator, or None to take the machine's best.
        timeout_s: seconds after which a collective whose peer is silent raises.

    Raises:
        LaunchError: the processes were not started as the layout needs.
        LayoutError: the layout is not for this number of processes.
    """
    if layout.world_size > 1:
        adopt_scheduler()
    place_device = pick_device(device)
    if not dist.is_initialized():
        _initialise(layout, place_device, timedelta(seconds=timeout_s))
    layout.check_world(dist.get_world_size())
    shape = tuple(getattr(layout, axis) for axis in AXES)
    mesh = init_device_mesh(place_device.type, shape, mesh_dim_names=AXES)
    return Groups(
        layout=layout, place=layout.place(dist.get_rank()), device=place_device, mesh=mesh
    )


def _initialise(layout: Layout, device: torch.device, timeout: timedelta) -> None:
    backend = backend_for(device)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not launched and layout.world_size > 1:
        raise LaunchError(
            f"layout {layout} needs {layout.world_size} processes and this is one; "
            f"{launch_command(layout.world_size)}"
        )
    # Not bound to its device: groups would then be split off, which not every backend can.
    try:
        if launched:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend,
                store=dist.HashStore(),  # type: ignore[attr-defined]
                rank=0,
                world_size=1,
                timeout=timeout,
            )
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"cannot meet the other processes at {address}: {reason}; "
            "give torchrun a free port with --master-port"
        ) from error
    atexit.register(disconnect)


def disconnect() -> None:
    """Leave the group, so that no thread of it outlives the interpreter.

    A gloo thread that still lets go of its last tensors when the interpreter ends aborts the
    process, and a sharded model keeps its group alive: so they are given a moment.

    After an uncaught error an accelerator's group is left alone: its operations would be waited
    for, though their peers may be gone.
    """
    failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and not (failed and dist.get_backend() != "gloo"):
        dist.destroy_process_group()
        time.sleep(SETTLE_S)

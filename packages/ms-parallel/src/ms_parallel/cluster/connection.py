"""Connects the processes of a layout, or explains how to launch them."""

import atexit
import errno
import os
import shlex
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ms_parallel.arguments import check_number, check_type
from ms_parallel.cluster.device import DeviceSpec, pick_device
from ms_parallel.cluster.groups import Groups, create_groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.mixed.kinds import HOST
from ms_parallel.cluster.process import launched, rank, variable, world_size
from ms_parallel.cluster.slurm import adopt_scheduler
from ms_parallel.cluster.start import agree_on_start
from ms_parallel.cluster.watch import Heartbeat, position
from ms_parallel.errors import LaunchError, LayoutError
from ms_parallel.interruption import end_with_launcher

SHUTDOWN_S = 0.2
"""Time for gloo's threads to finish before the interpreter exits."""
PROCESSES_PER_CORE = 4
"""Processes per core on hosts without accelerators, where layouts are only tried out."""


def connect(layout: Layout, *, device: DeviceSpec = None, timeout_s: float = 600.0) -> Groups:
    """Join the launched processes (or be the only one) and create the process groups of a layout.

    Args:
        layout: layout of the run; its world size must equal the number of processes.
        device: `"cpu"`, an accelerator, `Devices` with one per rank, or None for the machine's
            best.
        timeout_s: seconds after which a collective fails if a peer does not respond.

    Raises:
        LaunchError: the processes were not launched as the layout needs.
        LayoutError: the layout is for another number of processes.
    """
    check_type("layout", layout, Layout, "a Layout", error=LayoutError)
    check_number("timeout_s", timeout_s, minimum=0, error=LaunchError)
    join(layout, device=device, timeout_s=timeout_s)
    local_device = pick_device(device)
    if not dist.is_initialized():
        # A single process also gets a group, so that no caller needs a special case.
        _initialize(local_device, dist.HashStore(), 0, 1, timeout_s)  # type: ignore[attr-defined]
    return create_groups(layout, local_device, device if isinstance(device, Devices) else None)


def join(layout: Layout, *, device: DeviceSpec = None, timeout_s: float = 600.0) -> None:
    """Initialize the process group of a layout; does nothing for a single process.

    Args:
        layout: layout with the number of processes.
        device: as in `connect`.
        timeout_s: seconds after which a silent process counts as lost.

    Raises:
        LaunchError: torchrun is needed and was not used, its port is taken, or other processes do
            not connect.
        LayoutError: the layout is for another number of processes.
    """
    adopt_scheduler()
    if dist.is_initialized() and (launched() or dist.get_world_size() > 1):
        layout.check_world(dist.get_world_size())
        return
    if not launched():
        if layout.world_size > 1:
            raise LaunchError(
                f"layout {layout} needs {layout.world_size} processes and this is one;"
                f" {launch_command(layout.world_size)}"
            )
        return
    end_with_launcher()
    number, size = rank(), world_size()
    layout.check_world(size)
    local_device = pick_device(device)
    mixed = isinstance(device, Devices) and device.are_mixed
    # torchrun's agent may listen on the port already; otherwise rank 0 is about to.
    if number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _check_port()
    try:
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(iter(rendezvous("env://", number, size, timeout=timeout)))
        position.start = agree_on_start(store, number, size, timeout_s)
        # torchrun's store may still have the keys of earlier starts.
        store = PrefixStore(f"ms-parallel/attempt-{position.start}", store)
        # Mixed kinds communicate through host memory; `create_kind_groups` adds native groups.
        _initialize(HOST if mixed else local_device, store, number, size, timeout_s)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(_failure_text(error, number, timeout_s)) from error
    heartbeat = Heartbeat(number, size, timeout_s)
    atexit.register(heartbeat.stop)  # called before `disconnect`
    heartbeat.start()


def _initialize(
    device: torch.device, store: Any, rank: int, world_size: int, timeout_s: float
) -> None:
    backend = dist.get_default_backend_for_device(device)
    # With an accelerator, gloo handles CPU tensors. Not bound to the device, as groups would then
    # be created by splitting, which not every backend supports.
    dist.init_process_group(
        backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    atexit.register(disconnect)


def disconnect() -> None:
    """Destroy the process group, so that its threads do not outlive the interpreter.

    A gloo thread that frees its last tensors while the interpreter exits aborts the process, and a
    sharded model keeps its group alive, so these threads get a moment to finish.

    After an uncaught error an accelerator's group is left alone, as destroying it would wait for
    operations whose peers may be gone.
    """
    failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and not (failed and dist.get_backend() != "gloo"):
        dist.destroy_process_group()
        time.sleep(SHUTDOWN_S)


def _check_port() -> None:
    """Check that the port is free: the store listens on all addresses and would not notice."""
    host, port = os.environ["MASTER_ADDR"], variable("MASTER_PORT")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(_port_in_use()) from error


def _port_in_use() -> str:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return (
        f"port {port} is in use on this machine ({host}:{port}); set a free one for all ranks with"
        " MASTER_PORT or torchrun's --master-port, or start with torchrun --standalone, which"
        " chooses one"
    )


def _failure_text(error: Exception, number: int, timeout_s: float) -> str:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "EADDRINUSE" in str(error):
        return _port_in_use()
    if number > 0:
        return (
            f"rank {number} did not reach rank 0 at {host}:{port} within {timeout_s:g} s"
            f" ({reason}); start rank 0 too, or set a free MASTER_PORT for all ranks"
        )
    return f"the processes did not connect at {host}:{port} within {timeout_s:g} s ({reason})"


def launch_command(processes: int) -> str:
    """Return the torchrun command to type; on several hosts if one has too few devices or cores."""
    command = shlex.join([*_program(), *sys.argv[1:]])
    capacity = _processes_per_host()
    if processes <= capacity:
        return f"type: torchrun --standalone --nproc-per-node {processes} {command}"
    # torchrun starts the same number of processes on every host.
    per_host = max(n for n in range(1, capacity + 1) if processes % n == 0)
    return (
        f"this host has room for {capacity}; on each of {processes // per_host} hosts type:"
        f" torchrun --nnodes {processes // per_host} --nproc-per-node {per_host}"
        " --rdzv-backend c10d"
        f" --rdzv-endpoint FIRST_HOST:29500 {command}"
    )


def _program() -> list[str]:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    if Path(sys.argv[0]).name == "ms-parallel":
        return ["-m", "ms_parallel"]
    return [sys.argv[0] or "train.py"]


def _processes_per_host() -> int:
    """One process per device; without an accelerator four per core, which is slow but works."""
    return torch.accelerator.device_count() or PROCESSES_PER_CORE * len(os.sched_getaffinity(0))

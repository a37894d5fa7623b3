"""Connects the processes of a layout, and says what to type when they are not there."""

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

from ms_parallel.cluster.device import Wanted, pick_device
from ms_parallel.cluster.groups import Groups, lay_mesh
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.cluster.mixed.kinds import HOST
from ms_parallel.cluster.process import launched, rank, variable, world_size
from ms_parallel.cluster.slurm import adopt_scheduler
from ms_parallel.cluster.start import agree_on_start
from ms_parallel.cluster.watch import Heartbeat, position
from ms_parallel.errors import LaunchError
from ms_parallel.interruption import end_with_launcher

SETTLE_S = 0.2
CPU_SHARE = 4
"""Processes a core, where a layout is only tried."""


def connect(layout: Layout, *, device: Wanted = None, timeout_s: float = 600.0) -> Groups:
    """Join the processes that were started (or be the only one) and lay the mesh over them.

    Args:
        layout: how the processes split the work; its world size must be the number started.
        device: `"cpu"`, an accelerator, or None to take the machine's best; or `Devices`, which say
            which rank has which.
        timeout_s: seconds after which a collective whose peer is silent raises.

    Raises:
        LaunchError: the processes were not started as the layout needs.
        LayoutError: the layout is not for this number of processes.
    """
    join(layout, device=device, timeout_s=timeout_s)
    own = pick_device(device)
    if not dist.is_initialized():
        _initialise(own, dist.HashStore(), 0, 1, timeout_s)  # type: ignore[attr-defined]
    return lay_mesh(layout, own, device if isinstance(device, Devices) else None)


def join(layout: Layout, *, device: Wanted = None, timeout_s: float = 600.0) -> None:
    """Meet the other processes of a layout; do nothing for a process that runs alone.

    Args:
        layout: how many processes there must be.
        device: as in `connect`.
        timeout_s: seconds after which a silent process counts as lost.

    Raises:
        LaunchError: torchrun is needed and was not used, its port is taken, or the others do
            not come.
        LayoutError: the layout is not for this number of processes.
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
    own = pick_device(device)
    mixed = isinstance(device, Devices) and device.are_mixed
    if number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _check_port()
    try:
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(iter(rendezvous("env://", number, size, timeout=timeout)))
        position.start = agree_on_start(store, number, size, timeout_s)
        store = PrefixStore(f"ms-parallel/attempt-{position.start}", store)
        # Between kinds all goes through memory; each kind then makes a group of its own.
        _initialise(HOST if mixed else own, store, number, size, timeout_s)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(_why_not(error, number, timeout_s)) from error
    heartbeat = Heartbeat(number, size, timeout_s)
    atexit.register(heartbeat.stop)  # called before `disconnect`
    heartbeat.start()


def _initialise(
    device: torch.device, store: Any, rank: int, world_size: int, timeout_s: float
) -> None:
    backend = dist.get_default_backend_for_device(device)
    # Beside an accelerator's own, gloo exchanges what lies on the CPU. Not bound to its device:
    # groups would then be split off, which not every backend can.
    dist.init_process_group(
        backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
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


def _check_port() -> None:
    """Check that the port is free: the store listens on all addresses and would not notice."""
    host, port = os.environ["MASTER_ADDR"], variable("MASTER_PORT")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(_taken()) from error


def _taken() -> str:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return (
        f"port {port} is in use on this machine ({host}:{port}); choose a free one for all ranks"
        " with MASTER_PORT or torchrun's --master-port, or start with torchrun --standalone, which"
        " finds one"
    )


def _why_not(error: Exception, number: int, timeout_s: float) -> str:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "EADDRINUSE" in str(error):
        return _taken()
    if number > 0:
        return (
            f"rank {number} did not meet rank 0 at {host}:{port} within {timeout_s:g} s ({reason});"
            " start rank 0 too, or choose a free MASTER_PORT for all ranks"
        )
    return f"the processes did not meet at {host}:{port} within {timeout_s:g} s ({reason})"


def launch_command(processes: int) -> str:
    """Say which line to type; on each of several hosts where one has too few devices or cores."""
    words = shlex.join([*_program(), *sys.argv[1:]])
    room = _processes_a_host()
    if processes <= room:
        return f"type: torchrun --standalone --nproc-per-node {processes} {words}"
    each = max(n for n in range(1, room + 1) if processes % n == 0)
    return (
        f"this host has room for {room}; on each of {processes // each} hosts type: torchrun"
        f" --nnodes {processes // each} --nproc-per-node {each} --rdzv-backend c10d"
        f" --rdzv-endpoint FIRST_HOST:29500 {words}"
    )


def _program() -> list[str]:
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    if Path(sys.argv[0]).name == "ms-parallel":
        return ["-m", "ms_parallel"]
    return [sys.argv[0] or "train.py"]


def _processes_a_host() -> int:
    """Count one process a device; without an accelerator four a core, which is slow but works."""
    return torch.accelerator.device_count() or CPU_SHARE * len(os.sched_getaffinity(0))

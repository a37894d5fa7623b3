"""Joining the other processes, and saying what to type when they are not there."""

import atexit
import errno
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ms_parallel.cluster.groups import backend_for, disconnect
from ms_parallel.cluster.launch_line import launch_command
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.parent import end_with_launcher
from ms_parallel.cluster.watch import Heartbeat
from ms_parallel.errors import LaunchError

__all__ = ["is_first", "join", "launched", "rank", "world_size"]

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether torchrun, or somebody by hand, has told this process its rank."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    """This process's number among all, from 0."""
    if dist.is_initialized():
        return dist.get_rank()
    return _number("RANK") if launched() else 0


def world_size() -> int:
    """How many processes were started."""
    if dist.is_initialized():
        return dist.get_world_size()
    return _number("WORLD_SIZE") if launched() else 1


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return rank() == 0


def join(layout: Layout, *, timeout_s: float) -> None:
    """Meet the other processes of a layout; nothing to do for one that runs alone.

    Args:
        layout: how many processes there must be.
        timeout_s: seconds after which a silent process counts as lost.

    Raises:
        LaunchError: torchrun is needed and was not used, its port is taken, or the others do
            not come.
        LayoutError: the layout is not for this number of processes.
    """
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
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    backend = backend_for(accelerator or torch.device("cpu"))
    if number == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _check_port()
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(iter(rendezvous("env://", number, size, timeout=timeout)))
        # torchrun keeps one store over its restarts; without a prefix of its own, a restarted
        # process reads the addresses of the dead ones and waits for them.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"ms-parallel/attempt-{attempt}", store)
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(_why_not(error, number, timeout_s)) from error
    atexit.register(disconnect)
    heartbeat = Heartbeat(number, size, timeout_s)
    atexit.register(heartbeat.stop)  # called before `disconnect`
    heartbeat.start()


def _number(name: str) -> int:
    value = os.environ[name]
    if not value.isdecimal():
        raise LaunchError(f"{name} is {value!r}; it must be a whole number, or use torchrun")
    return int(value)


def _check_port() -> None:
    """The store would listen on all addresses and not see that one of them is taken."""
    host, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(_taken(str(port))) from error


def _taken(port: str) -> str:
    return (
        f"port {port} is in use on this machine (MASTER_PORT={port}); choose a free one for all"
        " ranks with MASTER_PORT, or start with torchrun --standalone, which finds one"
    )


def _why_not(error: Exception, number: int, timeout_s: float) -> str:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "EADDRINUSE" in str(error):
        return _taken(port)
    if number > 0:
        return (
            f"rank {number} did not meet rank 0 at {host}:{port} within {timeout_s:g} s ({reason});"
            " start rank 0 too, or choose a free MASTER_PORT for all ranks"
        )
    return f"the processes did not meet at {host}:{port} within {timeout_s:g} s ({reason})"

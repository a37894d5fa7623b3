"""Runs a job on Ray: one torchrun agent per node, all restarted after a failure.

The driver reserves a placement group with one bundle per node, starts an actor in each bundle, and
each actor starts torchrun. If an agent fails or its node is lost, all agents are stopped, Ray
places the lost bundle on another node, and the run resumes from its last checkpoint.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from importlib import import_module
from types import FrameType
from typing import Any

from ms_parallel.errors import ConfigError, LaunchError
from ms_parallel.launchers.job import ClusterJob

logger = logging.getLogger(__name__)

POLL_S = 0.5
PLACEMENT_S = 600.0
"""Seconds to wait for the nodes of a placement group."""
STOP_S = 10.0
"""Seconds for the actors of a failed attempt to kill their processes."""
END_WITH_PARENT = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0);"  # PR_SET_PDEATHSIG
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Python program that executes its arguments and dies with its parent, the Ray worker."""


class Agent:
    """Actor that runs torchrun on its node."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def endpoint(self) -> tuple[str, int]:
        """Return this node's address and a free port for the rendezvous."""
        util: Any = import_module("ray.util")
        with socket.socket() as free:
            free.bind(("", 0))
            address, port = str(util.get_node_ip_address()), int(free.getsockname()[1])
            return address, port

    def start(self, command: list[str], folder: str, grace_s: int) -> None:
        """Start this Python interpreter with arguments in a folder."""
        words = [sys.executable, "-c", END_WITH_PARENT, sys.executable, *command]
        # By default, torchrun kills its ranks 30 s after SIGTERM, even in a checkpoint.
        env = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace_s)}
        self.process = subprocess.Popen(words, cwd=folder, env=env)

    def poll(self) -> int | None:
        """Return the exit code of the command; None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def stop(self, number: int) -> None:
        """Send a signal to the command."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)


def launch_on_ray(
    job: ClusterJob,
    *,
    folder: str,
    address: str | None = None,
    resource: str | None = "GPU",
    max_restarts: int = 3,
    spread: bool = True,
) -> int:
    """Run a job on a Ray cluster and wait for it; return the exit code.

    Args:
        job: the run.
        folder: working directory on all nodes, on a shared disk.
        address: address of the cluster; None starts or finds a local one.
        resource: Ray resource of a device: `GPU`, `NPU`, or None for CPU processes.
        max_restarts: restarts of the run after a failed process or a lost node.
        spread: require a different node for each agent; False allows several on one node.

    Raises:
        ConfigError: Ray is not installed.
        LaunchError: the cluster has no room for the run.
    """
    try:
        ray: Any = import_module("ray")
        groups: Any = import_module("ray.util.placement_group")
    except ImportError as error:
        raise ConfigError("ray is not installed; pip install 'ray>=2.40'") from error
    ray.init(address=address, log_to_driver=True, ignore_reinit_error=True)
    bundle: dict[str, float] = {"CPU": job.cpus}
    if resource is not None:
        bundle[resource] = job.devices
    strategy = "STRICT_SPREAD" if spread else "PACK"
    group = groups.placement_group([bundle] * job.nodes, strategy=strategy)
    stopped: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        for attempt in range(max_restarts + 1):
            _wait_for_nodes(ray, group, job, bundle)
            code = _attempt(ray, job, group, bundle, folder, stopped)
            if code == 0 or stopped:
                return code
            logger.warning(
                "attempt %d of %d ended with exit code %d", attempt + 1, max_restarts + 1, code
            )
        return 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        groups.remove_placement_group(group)


def _wait_for_nodes(ray: Any, group: Any, job: ClusterJob, bundle: dict[str, float]) -> None:
    try:
        ray.get(group.ready(), timeout=PLACEMENT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise LaunchError(
            f"the Ray cluster must have {job.nodes} nodes with {bundle} free, and has"
            f" {ray.available_resources()}; add nodes, or lower nodes, devices or cpus"
        ) from error


def _attempt(
    ray: Any, job: ClusterJob, group: Any, bundle: dict[str, float], folder: str, stopped: list[int]
) -> int:
    """Run all agents until they end, one fails, or a signal stops them; return the exit code."""
    strategies: Any = import_module("ray.util.scheduling_strategies")
    devices = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
    remote = ray.remote(Agent)
    agents = [
        remote.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources=devices,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(job.nodes)
    ]
    forwarded = 0
    try:
        host, port = ray.get(agents[0].endpoint.remote())
        for rank, agent in enumerate(agents):
            ray.get(agent.start.remote(_command(job, rank, host, port), folder, job.grace_s))
        while True:
            codes = ray.get([agent.poll.remote() for agent in agents])
            if all(code is not None for code in codes):
                return max((int(code) for code in codes), key=abs)
            failed = [code for code in codes if code]
            if failed and not stopped:
                return int(failed[0])
            if len(stopped) > forwarded:  # the ranks write a checkpoint and exit
                forwarded = len(stopped)
                ray.get([agent.stop.remote(int(signal.SIGTERM)) for agent in agents])
            time.sleep(POLL_S)
    except ray.exceptions.RayError as error:
        logger.warning("lost an agent or its node: %s", str(error).splitlines()[0])
        return 1
    finally:
        for agent in agents:
            ray.kill(agent)  # also kills torchrun and its ranks


def _command(job: ClusterJob, rank: int, host: str, port: int) -> list[str]:
    """Return the arguments of Python that start torchrun on one node."""
    return [
        "-m",
        "torch.distributed.run",
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.devices}",
        f"--node-rank={rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
        "-m",
        *job.module.split(),
        job.run_file,
    ]

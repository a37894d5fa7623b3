r"""Ranks in separate network namespaces, joined by links of known latency and bandwidth.

Every rank's namespace has one TUN device; this process forwards their packets over one link per
pair: a packet leaves after the packets before it (size / bandwidth each) and arrives one latency
later. The kernel's TCP and the real backend run on top, unmodified. Needs Linux, `unshare`, `ip`
and user namespaces or root, but no kernel module.

    python shaped_network.py \\
        '{"ranks": 4, "usual": [0.001, 1e8], "links": {"1-3": [0.01, 2e7]}}' COMMAND...

A link is its latency in seconds and its bandwidth in bytes per second. Exits with a line and code 1
if the host does not support it.
"""

import array
import fcntl
import heapq
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

SET_DEVICE = 0x400454CA
TUN_WITHOUT_HEADER = 0x1001
MTU_BYTES = 16_000
DESTINATION_END = 19
"""Offset of the last byte of the destination address in an IPv4 header."""


@frozen
class Link:
    """The link of one pair, the same in both directions."""

    latency_s: float
    rate_bytes_per_s: float


def missing_requirement() -> str | None:
    """Return the requirement that this host lacks, or None."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    probe = [*NEW_NETWORK_NAMESPACE, sys.executable, "-c", "open('/dev/net/tun', 'rb+', 0).close()"]
    allowed = subprocess.run(probe, capture_output=True).returncode == 0
    return None if allowed else "this user cannot create network namespaces"


NEW_NETWORK_NAMESPACE = ("unshare", "--map-root-user", "--net")


def run_shaped(
    command: Sequence[str],
    *,
    ranks: int,
    default_link: Link,
    links: Mapping[tuple[int, int], Link] | None = None,
    timeout_s: float = 300.0,
) -> None:
    """Run a command in every rank's namespace, with torchrun's variables set, until all have ended.

    Args:
        command: command of each rank.
        ranks: number of ranks.
        default_link: the link of every pair that is not in `links`.
        links: links by (lower rank, higher rank).
        timeout_s: seconds after which the ranks are killed.

    Raises:
        RuntimeError: a rank failed, or time ran out.
    """
    devices, processes = [], []
    for rank in range(ranks):
        ours, theirs = socket.socketpair()
        join = [
            *NEW_NETWORK_NAMESPACE,
            sys.executable,
            __file__,
            "--join",
            str(theirs.fileno()),
            str(rank),
        ]
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": 29500}
        variables |= {
            "MASTER_ADDR": "10.77.0.1",
            "GLOO_SOCKET_IFNAME": "tun0",
            "OMP_NUM_THREADS": 1,
        }
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        processes.append(
            subprocess.Popen([*join, *command], env=environment, pass_fds=[theirs.fileno()])
        )
        theirs.close()
        devices.append(_receive_device(ours))
        ours.close()
    try:
        _forward_packets(
            devices, processes, default_link, links or {}, time.monotonic() + timeout_s
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for device in devices:
            os.close(device)


def _forward_packets(
    devices: Sequence[int],
    processes: Sequence["subprocess.Popen[bytes]"],
    default_link: Link,
    links: Mapping[tuple[int, int], Link],
    deadline: float,
) -> None:
    """Forward packets until every rank has ended."""
    ranks = {device: rank for rank, device in enumerate(devices)}
    free_at: dict[tuple[int, int], float] = {}
    in_flight: list[tuple[float, int, int, bytes]] = []
    number, next_check_s = 0, 0.0
    while True:
        now_s = time.monotonic()
        while in_flight and in_flight[0][0] <= now_s:
            _, _, target, packet = heapq.heappop(in_flight)
            os.write(devices[target], packet)
        if now_s >= next_check_s:
            next_check_s = now_s + 0.2
            codes = [process.poll() for process in processes]
            if any(codes) or now_s > deadline:
                raise RuntimeError(f"ranks ended with {codes}; None means they did not end in time")
            if codes == [0] * len(codes):
                return
        pause = min(in_flight[0][0] - time.monotonic() if in_flight else 0.05, 0.05)
        for device in select.select(devices, [], [], max(pause, 0.0))[0]:
            packet = os.read(device, MTU_BYTES + 100)
            source, target = ranks[device], packet[DESTINATION_END] - 1
            if packet[0] >> 4 != 4 or not 0 <= target < len(devices):
                continue  # the kernel's own neighbor discovery
            link = links.get((min(source, target), max(source, target)), default_link)
            start = max(time.monotonic(), free_at.get((source, target), 0.0))
            sent_s = free_at[source, target] = start + len(packet) / link.rate_bytes_per_s
            number += 1
            heapq.heappush(in_flight, (sent_s + link.latency_s, number, target, packet))


def _receive_device(from_socket: socket.socket) -> int:
    """Receive the file descriptor of a rank's device."""
    _, ancillary, _, _ = from_socket.recvmsg(1, socket.CMSG_SPACE(4))
    if not ancillary:
        raise RuntimeError("a rank's namespace could not be created; see its message above")
    descriptor = array.array("i")
    descriptor.frombytes(ancillary[0][2][:4])
    return descriptor[0]


def _join(channel: int, rank: int, command: Sequence[str]) -> None:
    """Inside a new namespace: create its device, pass it on, and become the command."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, SET_DEVICE, struct.pack("16sH", b"tun0", TUN_WITHOUT_HEADER))
    for arguments in (
        "link set lo up", f"link set tun0 mtu {MTU_BYTES} txqueuelen 10000 up",
        f"addr add 10.77.0.{rank + 1}/24 dev tun0",
    ):  # fmt: skip
        subprocess.run(["ip", *arguments.split()], check=True)
    with socket.socket(fileno=channel) as ours:
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
    os.close(device)
    os.execvp(command[0], command)


def main() -> None:
    """Run the command line; see the top of the file."""
    if sys.argv[1] == "--join":
        _join(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    if (requirement := missing_requirement()) is not None:
        sys.exit(f"no emulated network: {requirement}")
    settings = json.loads(sys.argv[1])
    links = {}
    for pair, values in settings["links"].items():
        first, second = pair.split("-")
        links[int(first), int(second)] = Link(*values)
    run_shaped(
        sys.argv[2:], ranks=settings["ranks"], default_link=Link(*settings["usual"]), links=links
    )


if __name__ == "__main__":
    main()

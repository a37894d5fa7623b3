r"""Ranks in network namespaces of their own, joined by links whose latency and bandwidth are known.

Every rank's namespace has one TUN device; this process carries their packets, each pair's over a
link of its own: a packet leaves when those before it have (size / bandwidth each), and arrives a
latency later. What runs above is the kernel's TCP and the real backend, untouched. Needs Linux,
`unshare`, `ip` and user namespaces or root, but no kernel module.

    python shaped_network.py \
        '{"ranks": 4, "usual": [0.001, 1e8], "links": {"1-3": [0.01, 2e7]}}' COMMAND...

A link is its latency in seconds and its bandwidth in bytes a second. Exits with a line and code 1
where the host cannot do it.
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
"""Offset of the last byte of the destination in an IPv4 header."""


@frozen
class Link:
    """One pair's link, the same in both directions."""

    latency_s: float
    rate_bytes_per_s: float


def missing() -> str | None:
    """What this host lacks to make such a network, or None."""
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    probe = [*OWN_NETWORK, sys.executable, "-c", "open('/dev/net/tun', 'rb+', 0).close()"]
    allowed = subprocess.run(probe, capture_output=True).returncode == 0
    return None if allowed else "this user may not make network namespaces"


OWN_NETWORK = ("unshare", "--map-root-user", "--net")


def run_shaped(
    command: Sequence[str],
    *,
    ranks: int,
    usual: Link,
    links: Mapping[tuple[int, int], Link] | None = None,
    timeout_s: float = 300.0,
) -> None:
    """Run a command in every rank's namespace, with torchrun's variables set, until all are done.

    Args:
        command: of each rank.
        ranks: how many.
        usual: the link of every pair that `links` doesn't name.
        links: by (lower rank, higher rank).
        timeout_s: after which the ranks are killed.

    Raises:
        RuntimeError: a rank failed, or time ran out.
    """
    devices, processes = [], []
    for rank in range(ranks):
        ours, theirs = socket.socketpair()
        join = [*OWN_NETWORK, sys.executable, __file__, "--join", str(theirs.fileno()), str(rank)]
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": 29500}
        place |= {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "tun0", "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        processes.append(
            subprocess.Popen([*join, *command], env=environment, pass_fds=[theirs.fileno()])
        )
        theirs.close()
        devices.append(_receive(ours))
        ours.close()
    try:
        _carry(devices, processes, usual, links or {}, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for device in devices:
            os.close(device)


def _carry(
    devices: Sequence[int],
    processes: Sequence["subprocess.Popen[bytes]"],
    usual: Link,
    links: Mapping[tuple[int, int], Link],
    deadline: float,
) -> None:
    """Carry packets until every rank is done."""
    ranks = {device: rank for rank, device in enumerate(devices)}
    free_at: dict[tuple[int, int], float] = {}
    waiting: list[tuple[float, int, int, bytes]] = []
    number, look_again = 0, 0.0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(waiting)
            os.write(devices[target], packet)
        if now >= look_again:
            look_again = now + 0.2
            codes = [process.poll() for process in processes]
            if any(codes) or now > deadline:
                raise RuntimeError(f"ranks ended with {codes}; None means not in time")
            if codes == [0] * len(codes):
                return
        pause = min(waiting[0][0] - time.monotonic() if waiting else 0.05, 0.05)
        for device in select.select(devices, [], [], max(pause, 0.0))[0]:
            packet = os.read(device, MTU_BYTES + 100)
            source, target = ranks[device], packet[DESTINATION_END] - 1
            if packet[0] >> 4 != 4 or not 0 <= target < len(devices):
                continue  # the kernel's own neighbor discovery
            link = links.get((min(source, target), max(source, target)), usual)
            begin = max(time.monotonic(), free_at.get((source, target), 0.0))
            sent = free_at[source, target] = begin + len(packet) / link.rate_bytes_per_s
            number += 1
            heapq.heappush(waiting, (sent + link.latency_s, number, target, packet))


def _receive(from_socket: socket.socket) -> int:
    """The descriptor that a rank sends of its device."""
    _, ancillary, _, _ = from_socket.recvmsg(1, socket.CMSG_SPACE(4))
    if not ancillary:
        raise RuntimeError("a rank's namespace could not be made; its message is above")
    descriptor = array.array("i")
    descriptor.frombytes(ancillary[0][2][:4])
    return descriptor[0]


def _join(channel: int, rank: int, command: Sequence[str]) -> None:
    """Inside of a new namespace: make its device, hand it over, and become the command."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, SET_DEVICE, struct.pack("16sH", b"tun0", TUN_WITHOUT_HEADER))
    for words in (
        "link set lo up", f"link set tun0 mtu {MTU_BYTES} txqueuelen 10000 up",
        f"addr add 10.77.0.{rank + 1}/24 dev tun0",
    ):  # fmt: skip
        subprocess.run(["ip", *words.split()], check=True)
    with socket.socket(fileno=channel) as ours:
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [device]))])
    os.close(device)
    os.execvp(command[0], command)


def main() -> None:
    """Run what the command line asks for; see the top."""
    if sys.argv[1] == "--join":
        _join(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    if (lack := missing()) is not None:
        sys.exit(f"no emulated network: {lack}")
    asked = json.loads(sys.argv[1])
    links = {}
    for pair, values in asked["links"].items():
        first, second = pair.split("-")
        links[int(first), int(second)] = Link(*values)
    run_shaped(sys.argv[2:], ranks=asked["ranks"], usual=Link(*asked["usual"]), links=links)


if __name__ == "__main__":
    main()

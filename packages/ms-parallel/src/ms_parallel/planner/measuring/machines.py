"""Measures all processes that have met, as the cluster that they are."""

import os
import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from ms_parallel.cluster.doctor.measured.exchange import gather_bytes
from ms_parallel.cluster.doctor.measured.pairs import one_way
from ms_parallel.cluster.doctor.recording.capture import memory_bytes
from ms_parallel.cluster.doctor.recording.machine import this_machine
from ms_parallel.cluster.doctor.recording.recording import Machine
from ms_parallel.errors import LaunchError
from ms_parallel.planner.cluster import Cluster, Collectives, Link, Links
from ms_parallel.planner.free_memory import left_by_limits
from ms_parallel.planner.measuring.fit import fit_link, rounded
from ms_parallel.planner.measuring.rates import DTYPES, memory_gb_per_s, product_tflops

SIZES_BYTES = (8, 1 << 9, 1 << 13, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Sizes of the messages that show latency, and of those that show bandwidth. There are none of
middle size: a line through both says more than is true of them, and a step's time lies in the
large ones."""
TRIPS = 8
WHOLE_BYTES = (1 << 9, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of what collectives gather, scatter and sum: norms, hidden states, weights."""
ROUNDS, REPEATED = 8, 4
"""Rounds in which a collective is timed, and how often it is called in each; the fastest counts."""
STATE_BYTES, MESSAGES = 1 << 15, 128
"""Size and number of the messages that show what a process works for one."""
GIB = 1 << 30


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured of its device."""

    machine: Machine
    threads: int
    memory_bytes: int
    """Memory that the processes of the machine may take."""
    left_bytes: int | None = None
    """What `ulimit` leaves this one; None where it does not say."""
    tflops: dict[str, float]
    """Empty where the process waited, as there are more than cores."""
    memory_gb_per_s: float = 0.0


def measure_cluster(device: torch.device) -> Cluster | None:
    """Measure the cluster that all processes are; all call this, and rank 0 gets it.

    Processes compute and send at the same time, as in a run. Where processes are more than a
    machine's cores, only as many compute.

    Args:
        device: of this process.

    Raises:
        LaunchError: machines have different numbers of processes.
    """
    together = dist.is_initialized() and dist.get_world_size() > 1
    rates = _rates(device)
    parts = gather_bytes(msgspec.json.encode(rates)) if together else [msgspec.json.encode(rates)]
    every = [msgspec.json.decode(part, type=Rates) for part in parts]
    each = _share_numbers(_processes(every) if every else 0) if together else 1
    links = _links(device, each) if together else Links()
    collectives = _collectives(device, each) if each > 1 else Collectives()
    work_us = _message_us(device) if together else None
    return _cluster(every, each, links, collectives, work_us, device) if every else None


def _rates(device: torch.device) -> Rates:
    machine, threads = this_machine(), torch.get_num_threads()
    computes = device.type != "cpu" or machine.local_rank < max(1, machine.cores // threads)
    if dist.is_initialized():
        dist.barrier()
    tflops, memory, left = {}, 0.0, left_by_limits()
    if computes:
        found = {name: product_tflops(dtype, device) for name, dtype in DTYPES.items()}
        tflops = {name: rate for name, rate in found.items() if rate}
        memory = memory_gb_per_s(device)
    return Rates(
        machine=machine,
        threads=threads,
        memory_bytes=memory_bytes(machine),
        left_bytes=None if left == inf else int(left),
        tflops=tflops,
        memory_gb_per_s=memory,
    )


def _processes(every: Sequence[Rates]) -> int:
    """Count the processes of each machine; 0 where machines differ."""
    nodes = [(one.machine.node, one.machine.host) for one in every]
    counts = {nodes.count(node) for node in nodes}
    return counts.pop() if len(counts) == 1 else 0


def _share_numbers(number: int) -> int:
    shared = torch.tensor([number])
    dist.broadcast(shared, src=0)
    if not int(shared):
        raise LaunchError(
            "machines have different numbers of processes; start the same number on each to"
            " measure them"
        )
    return int(shared)


def _links(device: torch.device, each: int) -> Links:
    """Measure each level that there is; what ranks other than 0 get is of no use."""
    nodes = dist.get_world_size() // each
    node = _level(device, partner(dist.get_rank(), each, 1, each)) if each > 1 else None
    network = None
    if nodes > 1:
        network = _level(device, partner(dist.get_rank(), each * nodes, each, nodes))
    return Links(node=node, network=network)


def partner(rank: int, span: int, step: int, count: int) -> int | None:
    """Return whom a rank exchanges with: the next of its level, in pairs; None for the odd one."""
    within = rank % span
    place = within // step % count
    if place == count - 1 and place % 2 == 0:
        return None
    return rank + step if place % 2 == 0 else rank - step


def _level(device: torch.device, partner: int | None) -> Link | None:
    """Measure the link that pairs exchange over; rank 0 gets it, the others None."""
    times = message_times(device, partner, SIZES_BYTES)
    return fit_link(SIZES_BYTES, times) if times else None


def message_times(
    device: torch.device, partner: int | None, sizes_bytes: Sequence[int]
) -> list[float]:
    """Time messages one way while all pairs exchange them: the median of the pairs, in seconds.

    All ranks call this; rank 0 gets the result, the others nothing.

    Args:
        device: where this rank's messages lie.
        partner: whom it exchanges with; None where it waits.
        sizes_bytes: of the messages.
    """
    rank, times = dist.get_rank(), []
    for size in sizes_bytes:
        dist.barrier()
        if partner is not None:
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            times.append(one_way(message, min(rank, partner), max(rank, partner), TRIPS))
    leads = partner is not None and rank < partner
    return _medians(times if leads else [])


def _message_us(device: torch.device) -> float | None:
    """Time a process's own work for messages that leave and come as those of pipelines do.

    All ranks call this; rank 0 gets the median of all, in microseconds. None where a process has
    more threads than one, whose work its clock does not tell, or where a device computes meanwhile.
    """
    world = dist.get_world_size()
    other = partner(dist.get_rank(), world, 1, world)
    times: list[float] = []
    if device.type == "cpu" and torch.get_num_threads() == 1 and other is not None:
        given, taken = (torch.zeros(STATE_BYTES // 4) for _ in range(2))
        began = time.process_time()
        for _ in range(MESSAGES):
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, given, other)])
            works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, taken, other)])
            for work in works:
                work.wait()
        times.append((time.process_time() - began) / MESSAGES)
    found = _medians(times)
    return rounded(found[0] * 1e6) if found else None


def _medians(own: Sequence[float]) -> list[float]:
    """Return the median of each number over the ranks that give some, on rank 0; else nothing."""
    parts = gather_bytes(msgspec.json.encode(own))
    given = [found for part in parts if (found := msgspec.json.decode(part, type=list[float]))]
    return [median(values) for values in zip(*given, strict=True)]


def _collectives(device: torch.device, each: int) -> Collectives:
    """Time the collectives of each node at once; rank 0 has those of the first node."""
    rank, group = dist.get_rank(), None
    for first in range(0, dist.get_world_size(), each):
        made = dist.new_group(list(range(first, first + each)))
        group = made if first <= rank < first + each else group
    assert group is not None
    found: dict[str, list[float]] = {}
    for size in WHOLE_BYTES:
        for name, once in collectives(device, group, each, size).items():
            found.setdefault(name, []).append(_collective_s(once, group, device))
    dist.destroy_process_group(group)
    links = {
        name: fit_link([size * (each - 1) // each for size in WHOLE_BYTES], times)
        for name, times in found.items()
    }
    return Collectives(**{name: _of_ring(name, link, each) for name, link in links.items()})


def collectives(
    device: torch.device, group: dist.ProcessGroup, count: int, size_bytes: int
) -> dict[str, Callable[[], object]]:
    """Return a function for each kind of collective, which performs it as split models ask for it.

    Args:
        device: where this rank's tensors lie.
        group: of the ranks that take part.
        count: of them.
        size_bytes: of the whole that is gathered, scattered or summed, or that a rank exchanges;
            as much of it as ranks can share equally.
    """
    each = max(1, size_bytes // 4 // count)
    whole = torch.zeros(each * count, device=device)
    gather, scatter = (
        getattr(dist, new, None) or getattr(dist, old)
        for new, old in (  # torch 2.13 renamed them
            ("all_gather_single", "all_gather_into_tensor"),
            ("reduce_scatter_single", "reduce_scatter_tensor"),
        )
    )
    other, part = torch.zeros_like(whole), whole[:each].clone()
    return {
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
    }


def _collective_s(
    once: Callable[[], object], group: dist.ProcessGroup, device: torch.device
) -> float:
    """Time a collective among others that follow it: the shortest of some rounds, in seconds."""
    times: list[float] = []
    for _ in range(ROUNDS):
        once()
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(REPEATED):
            once()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append((time.perf_counter() - start) / REPEATED)
    return min(times)


def _of_ring(name: str, link: Link, count: int) -> Link:
    """Turn a link that was fitted to whole collectives into that of one step of their ring."""
    turns = 2 if name == "all_reduce" else 1
    hops = 1 if name == "all_to_all" else count - 1
    return Link(
        latency_us=link.latency_us / (turns * hops),
        bandwidth_gb_per_s=link.bandwidth_gb_per_s * turns,
    )


def _cluster(
    every: Sequence[Rates],
    each: int,
    links: Links,
    collectives: Collectives,
    message_us: float | None,
    device: torch.device,
) -> Cluster:
    computed = [one for one in every if one.tflops]
    first, threads = every[0].machine, every[0].threads
    names = {name for one in computed for name in one.tflops}
    tflops = {
        name: rounded(median(o.tflops[name] for o in computed if name in o.tflops))
        for name in DTYPES
        if name in names
    }
    on_cpu = device.type == "cpu"
    chip = None if on_cpu or not first.accelerators else first.accelerators[0].name
    least = min(one.memory_bytes for one in every) / each
    own = (one.left_bytes for one in every if one.left_bytes is not None)
    memory = min([least, *own]) if on_cpu else first.accelerators[0].memory_bytes
    return Cluster(
        chip=chip,
        device=device.type,
        nodes=len(every) // each,
        devices_per_node=each,
        cores_per_node=max(1, first.cores // threads) if on_cpu else None,
        message_us=message_us,
        memory_gib=rounded(memory / GIB),
        memory_bandwidth_gb_per_s=rounded(median(o.memory_gb_per_s for o in computed)),
        peak_tflops=tflops,
        measured=True,
        links=links,
        collectives=collectives,
    )


def title() -> str:
    """Return the title of a measured file: where and when it was measured."""
    return f"measured on {os.uname().nodename}, {time.strftime('%Y-%m-%d %H:%M')}"

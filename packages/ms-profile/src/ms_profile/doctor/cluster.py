"""Measure the machines of all ranks and write them as a cluster file for `ms-parallel plan`."""

import json
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from ms_profile.arguments import check_type
from ms_profile.doctor.capture import memory_bytes, this_machine
from ms_profile.doctor.clocks import gather_bytes
from ms_profile.doctor.recording import Machine
from ms_profile.errors import DoctorError
from ms_profile.links.fit import fit_link
from ms_profile.links.measure import one_way

GIB: Final = 1 << 30
LINK_BYTES: Final = (8, 1 << 9, 1 << 13, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
"""Message sizes for latency and for bandwidth. Middle sizes are left out: no line fits all sizes
well, and most of a step's communication time is in large messages."""
LINK_TRIPS: Final = 8
COLLECTIVE_BYTES: Final = (1 << 9, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of gathered, scattered and reduced tensors: norms, hidden states, weights."""
COLLECTIVE_ROUNDS, COLLECTIVE_CALLS = 8, 4
"""Timed rounds of a collective (the fastest counts), and back-to-back calls per round."""
STATE_BYTES, MESSAGES = 1 << 15, 128
"""Size and number of the messages that show the CPU time per message."""
MIN_LATENCY_US, MIN_GB_PER_S, MAX_GB_PER_S = 1e-3, 1e-6, 1e9
DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MIN_ROWS, MAX_ROWS = 256, 8192
"""Range of the size of the square matrices that are multiplied."""
MIN_PRODUCT_S, PRODUCTS_S = 0.03, 0.5
"""Minimum time of a product to be measurable, and time for repeating the products of a dtype."""
REPEATS: Final = 5
CPU_PASS_BYTES, DEVICE_PASS_BYTES = 128 << 20, 1 << 30
"""Bytes read by a pass over memory: more than any cache holds."""
ULIMITS: Final = (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA))
"""Memory counts of a process, and the limits of `ulimit -v` and `ulimit -d` on them."""
RESERVED_BYTES: Final = 16 << 20
"""Part of a process's memory limit that is left free for the stacks of two more threads."""
Link = dict[str, float]


class RankRates(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds and memory of one rank."""

    machine: Machine
    threads: int
    memory_bytes: int
    """Memory available to all ranks of the machine."""
    ulimit_bytes: int | None
    """Memory that `ulimit` leaves to this rank; None without a limit."""
    tflops: dict[str, float]
    """10¹² operations per second in matrix products; empty if the machine has too few cores for
    this rank to compute."""
    memory_gb_per_s: float


def measure_cluster(device: torch.device) -> str | None:
    """Measure the machines of all ranks. Collective; rank 0 gets a cluster file as TOML text.

    Ranks compute and send at the same time, as in a run. If a machine has more ranks than cores,
    the ranks beyond the number of cores wait.

    Args:
        device: device of this rank.

    Raises:
        DoctorError: device is not a torch.device, or machines have different numbers of ranks.
    """
    check_type("device", device, torch.device, "a torch.device", error=DoctorError)
    rates = _measure_rates(device)
    if not dist.is_initialized():
        return _cluster_file([rates], device, ranks_per_node=1)
    parts = gather_bytes(msgspec.json.encode(rates))
    all_rates = [msgspec.json.decode(part, type=RankRates) for part in parts]
    ranks_per_node = broadcast(_ranks_per_node(all_rates) if all_rates else 0)
    if not ranks_per_node:
        raise DoctorError(
            "all machines must have the same number of ranks to be measured; start the same number"
            " on each"
        )
    links = _measure_links(device, ranks_per_node)
    collectives = _measure_collectives(device, ranks_per_node) if ranks_per_node > 1 else {}
    message_us = _cpu_us_per_message(device)
    if dist.get_rank() > 0:
        return None
    return _cluster_file(
        all_rates,
        device,
        ranks_per_node=ranks_per_node,
        message_us=message_us,
        links=links,
        collectives=collectives,
    )


def _measure_rates(device: torch.device) -> RankRates:
    machine, threads = this_machine(), torch.get_num_threads()
    # Ranks without a core of their own would only slow down the others' measurement.
    computes = device.type != "cpu" or machine.local_rank < max(1, machine.cores // threads)
    if dist.is_initialized():
        # All ranks compute at the same time, as in a run: they share memory bandwidth and power.
        dist.barrier()
    tflops: dict[str, float] = {}
    for name, dtype in DTYPES.items() if computes else ():
        rate = product_tflops(dtype, device)
        if rate:
            tflops[name] = rate
    return RankRates(
        machine=machine,
        threads=threads,
        memory_bytes=memory_bytes(machine),
        ulimit_bytes=_ulimit_bytes(),
        tflops=tflops,
        memory_gb_per_s=memory_gb_per_s(device) if computes else 0.0,
    )


def product_tflops(dtype: torch.dtype, device: torch.device) -> float | None:
    """Measure products of square matrices in 10¹² operations per second; None if unsupported.

    The matrices grow until a product takes long enough to be timed. A product of n rows counts as
    2 n³ operations.
    """
    rows = MIN_ROWS
    while True:
        try:
            product = _product(rows, dtype, device)
            seconds = _fastest(product, device, 2)
        except (RuntimeError, NotImplementedError):  # not implemented for this dtype and device
            return None
        if seconds >= MIN_PRODUCT_S or rows >= MAX_ROWS:
            break
        rows *= 2
    repeats = max(2, min(REPEATS, int(PRODUCTS_S / max(seconds, 1e-9))))
    return 2 * rows**3 / _fastest(product, device, repeats) / 1e12


def _product(rows: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def memory_gb_per_s(device: torch.device) -> float:
    """Measure reading and writing of a device's memory in 10⁹ bytes per second."""
    size_bytes = CPU_PASS_BYTES if device.type == "cpu" else DEVICE_PASS_BYTES
    source = torch.ones(size_bytes // 4, device=device)
    out = torch.empty_like(source)
    return 2 * size_bytes / _fastest(lambda: torch.neg(source, out=out), device, REPEATS) / 1e9


def _fastest(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the fastest of `repeats` calls in seconds, after one warmup."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # without the warmup


def _ulimit_bytes() -> int | None:
    """Bytes that `ulimit -v` and `ulimit -d` leave to this process; None without a limit."""
    lines = Path("/proc/self/status").read_text(errors="replace").splitlines()
    counts = dict(line.split(":", 1) for line in lines if ":" in line)
    # The counts in /proc are in kB.
    free = [
        resource.getrlimit(limit)[0] - int(counts[name].split()[0]) * 1024 - RESERVED_BYTES
        for name, limit in ULIMITS
        if resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
    ]
    return max(0, min(free)) if free else None


def _ranks_per_node(all_rates: Sequence[RankRates]) -> int:
    """Number of ranks of each machine; 0 if machines differ."""
    nodes = [(rates.machine.node, rates.machine.host) for rates in all_rates]
    counts = {nodes.count(node) for node in nodes}
    return counts.pop() if len(counts) == 1 else 0


def broadcast(number: int) -> int:
    """Return rank 0's number on all ranks."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, src=0)
    return int(tensor)


def _measure_links(device: torch.device, ranks_per_node: int) -> dict[str, Link]:
    """Measure links within machines and between them; the result is complete on rank 0 only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = {}
    if ranks_per_node > 1:
        peers["node"] = partner(rank, ranks_per_node, 1, ranks_per_node)
    if world > ranks_per_node:
        peers["network"] = partner(rank, world, ranks_per_node, world // ranks_per_node)
    links = {}
    for level, peer in peers.items():
        times = message_times(device, peer, LINK_BYTES)
        if times:
            links[level] = link_from_times(LINK_BYTES, times)
    return links


def partner(rank: int, span: int, step: int, count: int) -> int | None:
    """Rank that a rank exchanges messages with; None for the odd one out.

    Args:
        rank: rank.
        span: number of neighboring ranks that form a group.
        step: distance between partners.
        count: number of ranks of a group that are `step` apart.
    """
    index = rank % span // step % count
    if index == count - 1 and index % 2 == 0:
        return None
    return rank + step if index % 2 == 0 else rank - step


def message_times(
    device: torch.device, peer: int | None, sizes_bytes: Sequence[int]
) -> list[float]:
    """Measure messages one way while all pairs exchange them. Collective.

    Args:
        device: device of this rank's messages.
        peer: rank to exchange messages with; None to wait.
        sizes_bytes: message sizes.

    Returns:
        On rank 0 the median time of the pairs in seconds for each size; [] on other ranks.
    """
    times = []
    for size_bytes in sizes_bytes:
        dist.barrier()
        if peer is not None:
            times.append(one_way(peer, size_bytes, LINK_TRIPS, device))
    # Only the lower rank of a pair measured a full round trip; see `one_way`.
    return _medians(times if peer is not None and dist.get_rank() < peer else [])


def link_from_times(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Link:
    """Fit a link of a cluster file to one-way times, within the range of values of the file."""
    fit = fit_link(sizes_bytes, times_s)
    bandwidth = fit.bandwidth_bytes_per_s
    gb_per_s = MAX_GB_PER_S if bandwidth is None else bandwidth / 1e9
    return {
        "latency_us": _rounded(max(MIN_LATENCY_US, fit.latency_s * 1e6)),
        "bandwidth_gb_per_s": _rounded(min(MAX_GB_PER_S, max(MIN_GB_PER_S, gb_per_s))),
    }


def _rounded(value: float) -> float:
    """Round to four significant digits, more than any measurement has."""
    return float(f"{value:.4g}")


def _medians(values: Sequence[float]) -> list[float]:
    """Return on rank 0 the median of each value over the ranks that pass any; [] elsewhere."""
    parts = gather_bytes(msgspec.json.encode(values))
    rows = [row for part in parts if (row := msgspec.json.decode(part, type=list[float]))]
    return [median(column) for column in zip(*rows, strict=True)]


def _cpu_us_per_message(device: torch.device) -> float | None:
    """Measure the CPU time of a rank to send and receive a pipeline message. Collective.

    Returns:
        On rank 0 the median in microseconds. None if ranks have several threads, as the process
        clock counts all threads, or an accelerator, which computes meanwhile.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    peer = partner(rank, world, 1, world)
    times: list[float] = []
    if device.type == "cpu" and torch.get_num_threads() == 1 and peer is not None:
        sent, received = (torch.zeros(STATE_BYTES // 4) for _ in range(2))
        start = time.process_time()
        for _ in range(MESSAGES):
            # A send and a receive per message, posted as a pipeline stage posts them.
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer)])
            works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer)])
            for work in works:
                work.wait()
        times.append((time.process_time() - start) / MESSAGES)
    medians = _medians(times)
    return _rounded(medians[0] * 1e6) if medians else None


def _measure_collectives(device: torch.device, ranks_per_node: int) -> dict[str, Link]:
    """Time the collectives of all machines at once; each rank returns its machine's."""
    rank, group = dist.get_rank(), None
    for first in range(0, dist.get_world_size(), ranks_per_node):
        # Every rank must create every group, also those it is not in.
        new_group = dist.new_group(list(range(first, first + ranks_per_node)))
        group = new_group if first <= rank < first + ranks_per_node else group
    assert group is not None
    times: dict[str, list[float]] = {}
    for size_bytes in COLLECTIVE_BYTES:
        for name, call in collectives(device, group, ranks_per_node, size_bytes).items():
            times.setdefault(name, []).append(_collective_s(call, group, device))
    dist.destroy_process_group(group)
    return {name: _ring_link(name, ranks_per_node, times[name]) for name in times}


def collectives(
    device: torch.device, group: dist.ProcessGroup, ranks: int, size_bytes: int
) -> dict[str, Callable[[], object]]:
    """Collectives by name, each a function that performs it as a sharded model does.

    Args:
        device: device of this rank's tensors.
        group: ranks that take part.
        ranks: number of ranks in the group.
        size_bytes: size of the full tensor, rounded down to a multiple of the number of ranks.
    """
    shard_numel = max(1, size_bytes // 4 // ranks)
    full = torch.zeros(shard_numel * ranks, device=device)
    shard, received = full[:shard_numel].clone(), torch.zeros_like(full)
    all_gather, reduce_scatter = (
        getattr(dist, new, None) or getattr(dist, old)
        for new, old in (  # renamed in torch 2.13
            ("all_gather_single", "all_gather_into_tensor"),
            ("reduce_scatter_single", "reduce_scatter_tensor"),
        )
    )
    return {
        "all_gather": lambda: all_gather(full, shard, group=group),
        "reduce_scatter": lambda: reduce_scatter(shard, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, full, group=group),
    }


def _collective_s(
    call: Callable[[], object], group: dist.ProcessGroup, device: torch.device
) -> float:
    """Time a collective within a back-to-back sequence, in seconds."""
    times: list[float] = []
    for _ in range(COLLECTIVE_ROUNDS):
        call()
        dist.barrier(group)
        start = time.perf_counter()
        for _ in range(COLLECTIVE_CALLS):
            call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append((time.perf_counter() - start) / COLLECTIVE_CALLS)
    return min(times)


def _ring_link(name: str, ranks: int, times_s: Sequence[float]) -> Link:
    """Fit a link to the times of a collective, as one step of a ring over it."""
    # In a ring, a rank sends all shards but one, in ranks - 1 hops.
    sent_bytes = [size_bytes * (ranks - 1) // ranks for size_bytes in COLLECTIVE_BYTES]
    link = link_from_times(sent_bytes, times_s)
    # An all-reduce is a reduce-scatter and an all-gather: twice the hops and twice the bytes.
    turns = 2 if name == "all_reduce" else 1
    hops = 1 if name == "all_to_all" else ranks - 1
    return {
        "latency_us": link["latency_us"] / (turns * hops),
        "bandwidth_gb_per_s": min(MAX_GB_PER_S, link["bandwidth_gb_per_s"] * turns),
    }


def _cluster_file(
    all_rates: Sequence[RankRates],
    device: torch.device,
    *,
    ranks_per_node: int,
    message_us: float | None = None,
    links: Mapping[str, Link] = {},
    collectives: Mapping[str, Link] = {},
) -> str:
    first, on_cpu = all_rates[0], device.type == "cpu"
    computing = [rates for rates in all_rates if rates.tflops]
    tflops = {
        name: [rates.tflops[name] for rates in computing if name in rates.tflops] for name in DTYPES
    }
    accelerator = None if on_cpu else first.machine.accelerators[0]
    if accelerator is None:
        limits = [rates.ulimit_bytes for rates in all_rates if rates.ulimit_bytes is not None]
        memory = min([min(r.memory_bytes for r in all_rates) / ranks_per_node, *limits])
    else:
        memory = accelerator.memory_bytes
    cluster = {
        "chip": None if accelerator is None else accelerator.name,
        "device": device.type,
        "nodes": len(all_rates) // ranks_per_node,
        "devices_per_node": ranks_per_node,
        "cores_per_node": max(1, first.machine.cores // first.threads) if on_cpu else None,
        "message_us": message_us,
        "memory_gib": _rounded(memory / GIB),
        "memory_bandwidth_gb_per_s": _rounded(median(r.memory_gb_per_s for r in computing)),
        "measured": True,
        "peak_tflops": {name: _rounded(median(rates)) for name, rates in tflops.items() if rates},
        "links": links,
        "collectives": collectives,
    }
    title = f"measured on {os.uname().nodename}, {time.strftime('%Y-%m-%d %H:%M')}"
    return f"# {title}\n" + "".join(f"{line}\n" for line in _toml_lines(cluster))


def _toml_lines(table: Mapping[str, Any], name: str = "") -> list[str]:
    """Format a table of numbers, texts, flags and tables as TOML; None is left out."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping | None)}
    lines = ["", f"[{name}]"] if name and values else []
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _toml_lines(value, f"{name}.{key}" if name else key)
    return lines

"""Runs of `test_room.py` in limited memory, each in fresh processes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import torch
from attrs import evolve
from memory_runs import MemoryLimit

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Cluster, ClusterLinks, Link
from ms_parallel.planner.free_memory import map_blocks, shrink_stacks, status_bytes
from ms_parallel.planner.layouts.candidate import Split
from ms_parallel.planner.layouts.choice import USABLE
from ms_parallel.planner.layouts.enumeration import divisors
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.planner.record.history import History
from ms_parallel.training.engine_setup import engine_settings, fit_model
from ms_parallel.training.memory import run_memory
from ms_parallel.training.microbatch_size import predict_microbatch_size, resolve_microbatch_size
from ms_parallel.training.options import Options
from ms_parallel.training.planning.auto_layout import measured_cluster
from ms_parallel.training.planning.counting import working_bytes
from ms_parallel.training.planning.plan import plan

UPDATES = 3
GIB = 1 << 30
MIN_LIMIT = 1.02
"""Minimum memory limit, as a multiple of what one row needs."""


def predicted_memory(layout: str, settings: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """Predicted memory of each pipeline rank, by rows of a microbatch."""
    options = Options("llama", device="cpu", **settings)
    memory = {rows: run_memory(options, Layout.parse(layout), None, rows) for rows in sizes}
    return {str(rows): [msgspec.structs.asdict(rank) for rank in memory[rows]] for rows in sizes}


def plan_run(
    processes: int, settings: dict[str, Any], bandwidth: float, share: float
) -> dict[str, Any]:
    """Plan a run on processes of this machine within a memory limit.

    Args:
        processes: number of processes of the cluster.
        settings: settings of the run.
        bandwidth: bandwidth of the links, in 10⁹ bytes per second.
        share: memory limit, from 0 (little more than one row needs) to 1 (the full batch fits).

    Returns:
        The best `layout` and `settings`, the `rows` of its microbatch, the possible `sizes`, those
        that the plan says fit (`fits`), and the limit of a rank, `memory_bytes`.
    """
    options = Options("llama", device="cpu", **settings)
    uneven = options.batch_size % processes
    spread = Layout(tensor=processes) if uneven else Layout(data=processes)
    rows = options.batch_size // spread.data_ranks
    minimum, maximum = (_planned_bytes(options, spread, size) for size in (1, rows))
    memory = int(MIN_LIMIT * minimum + share * max(0, maximum - MIN_LIMIT * minimum))
    cluster = Cluster(
        device="cpu",
        devices_per_node=processes,
        memory_gib=1.0,
        memory_bandwidth_gb_per_s=10,
        peak_tflops={"float32": 0.05},
        links=ClusterLinks(node=Link(latency_us=100, bandwidth_gb_per_s=bandwidth)),
    )
    limited = evolve(options, memory_gib=memory / GIB)
    (best,) = plan(limited, cluster, best=1, history=History()).best
    best_settings = {
        name: value for name, value in best.settings.items() if name != "microbatch_size"
    }
    layout = Layout(**best.layout)
    sizes = divisors(options.batch_size // layout.data_ranks)
    final = evolve(options, **best_settings)
    return {
        "layout": str(layout),
        "settings": best_settings,
        "rows": best.settings["microbatch_size"],
        "sizes": sizes,
        "fits": [size for size in sizes if _planned_bytes(final, layout, size) <= memory],
        "memory_bytes": memory,
    }


def _planned_bytes(options: Options, layout: Layout, rows: int) -> float:
    """Bytes that a plan assumes a rank of this machine to hold, with `rows` in a microbatch."""
    split = Split(layout=layout, rows=rows, microbatches=1)
    model = ModelSizes.of(fit_model(options, layout, None))
    working = working_bytes(split, model, options.sequence_length)
    ranks = run_memory(options, layout, None, rows)
    return max(max(rank.total / USABLE, rank.total + working) for rank in ranks)


def memory_overhead(limited: bool) -> dict[str, float]:
    """MiB that a process holds for every second tensor of 64 (1 MiB each), and for a thread."""
    if limited:
        map_blocks()
        shrink_stacks()
    mib = 1 << 20
    # Freeing a large block raises glibc's mmap threshold, so that smaller blocks go to the heap.
    torch.empty(16 * mib, dtype=torch.uint8).fill_(0)
    before = status_bytes("VmData")
    tensors = [torch.ones(mib, dtype=torch.uint8) for _ in range(64)]
    del tensors[::2]
    blocks = status_bytes("VmData") - before
    done = Event()
    before = status_bytes("VmData")
    thread = Thread(target=done.wait)
    thread.start()
    stack = status_bytes("VmData") - before
    done.set()
    thread.join()
    return {"blocks": blocks / mib, "stack": stack / mib, "tensors": float(len(tensors))}


def measured_in(room_bytes: int) -> float:
    """Measured memory in GiB of this process as a cluster, limited to `room_bytes`."""
    with MemoryLimit(room_bytes):
        cluster = measured_cluster(torch.device("cpu"))
    assert cluster is not None  # this is the first process
    return cluster.memory_gib


def train_within_limit(
    room_bytes: int,
    layout: str,
    settings: dict[str, Any],
    size: int | str,
    predictions: Mapping[str, Any],
    updates: int = UPDATES,
    every: bool = False,
) -> dict[str, Any]:
    """Train as `DistributedTrainer` starts a run, with limited memory on the last rank.

    Args:
        room_bytes: memory that the rank may allocate.
        layout: layout of the processes.
        settings: settings of the run.
        size: rows of a microbatch, or "auto".
        predictions: predicted memory by size.
        updates: number of updates.
        every: limit all ranks.

    Returns:
        `rows` of a microbatch, or the message of a refusal (`refused`) or of an out-of-memory error
        (`failed`).
    """
    torch.set_num_threads(1)
    split = Layout.parse(layout)
    folder = tempfile.mkdtemp()
    run_options = Options(
        "llama", device="cpu", output_dir=Path(folder), microbatch_size=size, **settings
    )
    config = fit_model(run_options, split, None)
    groups = connect(split, device="cpu", timeout_s=500)  # the machine may be busy

    def predict(rows: int) -> list[RankMemory]:
        return [RankMemory(**rank) for rank in predictions[str(rows)]]

    generator = torch.Generator().manual_seed(0)
    rows = run_options.batch_size // split.data_ranks
    shape = (rows, run_options.sequence_length + 1)
    text = torch.randint(0, config.vocab_size, shape, generator=generator)
    with MemoryLimit(room_bytes, every=every):
        try:
            options = predict_microbatch_size(run_options, split, predict)
            engine = Engine(config, groups=groups, **engine_settings(options, split, 8))
            resolve_microbatch_size(engine, run_options, split, predict)
            for _ in range(updates):
                engine.step({"tokens": text[:, :-1], "targets": text[:, 1:]}, NextTokenLoss())
        except ConfigError as error:
            return {"refused": str(error)}
        except (MemoryError, RuntimeError) as error:
            return {"failed": str(error)}
    return {"rows": engine.runner.microbatch_size or rows}

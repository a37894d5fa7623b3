"""Runs in little memory: called by `run_processes`, each in fresh processes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import torch
from attrs import evolve
from memory_runs import Room

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
from ms_parallel.training.fitting import engine_settings, fit_model
from ms_parallel.training.memory import run_memory
from ms_parallel.training.microbatch_size import predict_microbatch_size, resolve_microbatch_size
from ms_parallel.training.options import Options
from ms_parallel.training.planning.auto_layout import measured_cluster
from ms_parallel.training.planning.counting import working_bytes
from ms_parallel.training.planning.plan import plan

UPDATES = 3
GIB = 1 << 30
LEAST = 1.02
"""Times what one row needs that is drawn at least."""


def foretold(layout: str, settings: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """What each pipeline rank holds, by rows of a microbatch."""
    options = Options("llama", device="cpu", **settings)
    each = {rows: run_memory(options, Layout.parse(layout), None, rows) for rows in sizes}
    return {str(rows): [msgspec.structs.asdict(rank) for rank in each[rows]] for rows in sizes}


def planned(
    processes: int, settings: dict[str, Any], bandwidth: float, share: float
) -> dict[str, Any]:
    """The plan of a run on so many processes of this machine, in memory drawn by chance.

    Args:
        processes: of the cluster.
        settings: of the run.
        bandwidth: of the links between them, in 10⁹ bytes a second.
        share: from 0 to 1: from little more than the smallest rows need to what the largest do.

    Returns:
        `layout` and `settings` of the best; `rows` of its microbatch; `sizes` that there are, and
        of them those that its plan takes to fit, `fits`; the `memory_bytes` that a rank may hold.
    """
    options = Options("llama", device="cpu", **settings)
    odd = options.batch_size % processes
    spread = Layout(tensor=processes) if odd else Layout(data=processes)
    rows = options.batch_size // spread.data_ranks
    least, most = (_held(options, spread, each) for each in (1, rows))
    memory = int(LEAST * least + share * max(0, most - LEAST * least))
    cluster = Cluster(
        device="cpu",
        devices_per_node=processes,
        memory_gib=1.0,
        memory_bandwidth_gb_per_s=10,
        peak_tflops={"float32": 0.05},
        links=ClusterLinks(node=Link(latency_us=100, bandwidth_gb_per_s=bandwidth)),
    )
    asked = evolve(options, memory_gib=memory / GIB)
    (best,) = plan(asked, cluster, best=1, history=History()).best
    chosen = {name: value for name, value in best.settings.items() if name != "microbatch_size"}
    layout = Layout(**best.layout)
    sizes = divisors(options.batch_size // layout.data_ranks)
    told = evolve(options, **chosen)
    return {
        "layout": str(layout),
        "settings": chosen,
        "rows": best.settings["microbatch_size"],
        "sizes": sizes,
        "fits": [each for each in sizes if _held(told, layout, each) <= memory],
        "memory_bytes": memory,
    }


def _held(options: Options, layout: Layout, rows: int) -> float:
    """What a plan takes a rank of this machine to hold, with so many rows in a microbatch."""
    split = Split(layout=layout, rows=rows, microbatches=1)
    model = ModelSizes.of(fit_model(options, layout, None))
    beside = working_bytes(split, model, options.sequence_length)
    ranks = run_memory(options, layout, None, rows)
    return max(max(rank.total / USABLE, rank.total + beside) for rank in ranks)


def kept_in_gaps(limited: bool) -> dict[str, float]:
    """What a process holds of every second one of 64 tensors of 1 MiB, and a thread; in MiB."""
    if limited:
        map_blocks()
        shrink_stacks()
    mib = 1 << 20
    torch.empty(16 * mib, dtype=torch.uint8).fill_(0)  # whose end lets smaller ones into the heap
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
    """Memory in GiB of the cluster that this process is, which may take so much more."""
    with Room(room_bytes):
        cluster = measured_cluster(torch.device("cpu"))
    assert cluster is not None  # this is the first process
    return cluster.memory_gib


def trained(
    room_bytes: int,
    layout: str,
    settings: dict[str, Any],
    size: int | str,
    foretold: Mapping[str, Any],
    updates: int = UPDATES,
    every: bool = False,
) -> dict[str, Any]:
    """Train as `DistributedTrainer` begins a run, where the last rank has so much more memory.

    Args:
        room_bytes: that it may take.
        layout: of the processes.
        settings: of the run.
        size: of microbatches.
        foretold: what each size was predicted to hold.
        updates: that are made.
        every: whether no rank may take more.

    Returns:
        `rows` of a microbatch; or why there are none, `refused`; or that memory ran out, `failed`.
    """
    torch.set_num_threads(1)
    split = Layout.parse(layout)
    folder = tempfile.mkdtemp()
    asked = Options(
        "llama", device="cpu", output_dir=Path(folder), microbatch_size=size, **settings
    )
    config = fit_model(asked, split, None)
    groups = connect(split, device="cpu", timeout_s=60)

    def predict(rows: int) -> list[RankMemory]:
        return [RankMemory(**rank) for rank in foretold[str(rows)]]

    generator = torch.Generator().manual_seed(0)
    rows = asked.batch_size // split.data_ranks
    shape = (rows, asked.sequence_length + 1)
    text = torch.randint(0, config.vocab_size, shape, generator=generator)
    with Room(room_bytes, every=every):
        try:
            options = predict_microbatch_size(asked, split, predict)
            engine = Engine(config, groups=groups, **engine_settings(options, split, 8))
            resolve_microbatch_size(engine, asked, split, predict)
            for _ in range(updates):
                engine.step({"tokens": text[:, :-1], "targets": text[:, 1:]}, NextTokenLoss())
        except ConfigError as error:
            return {"refused": str(error)}
        except (MemoryError, RuntimeError) as error:
            return {"failed": str(error)}
    return {"rows": engine.runner.microbatch_size or rows}

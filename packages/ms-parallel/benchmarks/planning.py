"""Compare plans with measurements of every layout of random models: time, order and memory.

    OMP_NUM_THREADS=1 python packages/ms-parallel/benchmarks/planning.py --json planning.json

A case is a model, a batch and a memory budget, on a few gloo processes of this machine, whose links
and rates are measured first. A plan finds the best settings of every layout with every microbatch
size that fits. All these settings are run by real processes, started once per layout, in order and
again in reverse order, with more steps if they are short. The fastest step counts, as other load
only adds time. The script prints how much slower the chosen layout is than the best, the rank
correlation of predicted and measured steps, and the memory of the chosen layout with its budget.
"""

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import queue
import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch.profiler import ProfilerActivity, profile, record_function

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import ConfigError
from ms_parallel.models.registry import architecture
from ms_parallel.planner.cluster import Cluster, read_cluster, write_cluster
from ms_parallel.planner.layouts.choice import USABLE
from ms_parallel.planner.record.history import History
from ms_parallel.planner.record.plan_file import Plan
from ms_parallel.training.memory import run_memory
from ms_parallel.training.options import Options
from ms_parallel.training.planning.auto_layout import measured_cluster
from ms_parallel.training.planning.plan import plan

SLOW = 2.5
"""Layouts slower than the best by this factor are not run again."""
MIN_STEPS, MAX_STEPS, TURN_S = 2, 24, 0.6
"""Steps of a turn: between the two limits, for about `TURN_S` seconds."""
UPDATES = 4
"""Updates whose memory is counted."""
TIMEOUT_S = 900
PRELOADED = ["torch._dynamo", "ms_parallel.engine.engine", "ms_profile.doctor.cluster"]
GIB = 1 << 30
ALL = 1000
ROOMS = (None, 1.5, 1.1)
"""Memory budgets, as multiples of the need of single rows with everything sharded over data ranks;
None: no limit."""


def draw(seed: int, processes: Sequence[int]) -> dict[str, Any]:
    """A random model, its batch, and the number of processes."""
    rng = random.Random(seed)
    hidden = rng.choice((128, 192, 256))
    model = {
        "hidden_size": hidden,
        "intermediate_size": rng.choice((2, 3)) * hidden,
        "num_hidden_layers": rng.choice((4, 6, 8)),
        "num_attention_heads": 8,
        "num_key_value_heads": rng.choice((4, 8)),
        "vocab_size": rng.choice((512, 2048, 8192)),
    }
    return {
        "processes": rng.choice(processes),
        "model": model,
        "batch_size": rng.choice((4, 8)),
        "sequence_length": rng.choice((64, 128)),
        "room": rng.choice(ROOMS),
    }


def run_workers(processes: int, target: Callable[..., Any], *arguments: Any) -> Any:
    """Result of rank 0 of a group of processes, which are forked after torch was imported."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*PRELOADED, "__main__"])
    results = forks.Queue()
    group = (processes, store.port, results)
    ranks = [
        forks.Process(target=work, args=(rank, *group, target, *arguments))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    result: Any = None
    start = perf_counter()
    while any(rank.is_alive() for rank in ranks):
        with contextlib.suppress(queue.Empty):
            result = results.get(timeout=0.05)
        timed_out = perf_counter() - start > TIMEOUT_S
        if timed_out or any(rank.exitcode for rank in ranks):
            break
    with contextlib.suppress(queue.Empty):
        result = results.get(timeout=0.05) if result is None else result
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(codes) or None in codes:
        raise ConfigError(f"ranks ended with {codes}: {arguments}")
    return result


def work(
    rank: int,
    processes: int,
    port: int,
    results: "multiprocessing.Queue[Any]",
    target: Callable[..., Any],
    *arguments: Any,
) -> None:
    """Run the target as one process."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo")
    result = target(*arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def measure(path: str) -> bool:
    """Measure these processes as a cluster and write its file."""
    cluster = measured_cluster(torch.device("cpu"))
    if cluster is not None:
        write_cluster(Path(path), cluster)
    return True


def time_candidates(
    job: dict[str, Any], splits: list[dict[str, Any]], layout: Layout
) -> list[list[float]]:
    """Seconds of steps of each candidate of a layout."""
    groups = connect(layout, device="cpu")
    return [
        steps(
            job,
            split["settings"],
            groups,
            min(MAX_STEPS, max(MIN_STEPS, int(TURN_S / split["predicted"]))),
        )
        for split in splits
    ]


def measure_candidates(job: dict[str, Any], splits: list[dict[str, Any]]) -> list[list[float]]:
    """Seconds of steps of each candidate, in order and in reverse; once if a layout is `SLOW`.

    Layouts run in separate processes, as threads of unused gloo groups wake up a hundred times per
    second and disturb others.
    """
    layouts: dict[Layout, list[int]] = {}
    for index, split in enumerate(splits):
        layouts.setdefault(Layout(**split["layout"]), []).append(index)
    times: list[list[float]] = [[] for _ in splits]
    for layout, indices in [*layouts.items(), *reversed(layouts.items())]:
        if times[indices[0]]:
            best = min(min(seconds) for seconds in times)
            if min(min(times[index]) for index in indices) > SLOW * best:
                continue
            indices = indices[::-1]
        of_layout = [splits[index] for index in indices]
        results = run_workers(job["processes"], time_candidates, job, of_layout, layout)
        for index, seconds in zip(indices, results, strict=True):
            times[index] += seconds
    return times


def build_engine(
    job: dict[str, Any], settings: dict[str, Any], groups: Groups
) -> tuple[Engine, dict[str, torch.Tensor]]:
    """An engine and its batch."""
    config = architecture("llama", job["model"])
    engine = Engine(config, groups=groups, **settings)
    generator = torch.Generator().manual_seed(0)
    rows = job["batch_size"] // groups.layout.data_ranks
    text = torch.randint(
        0, config.vocab_size, (rows, job["sequence_length"] + 1), generator=generator
    )
    return engine, {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def steps(job: dict[str, Any], settings: dict[str, Any], groups: Groups, count: int) -> list[float]:
    """Seconds of steps, after an untimed one."""
    engine, batch = build_engine(job, settings, groups)
    times = []
    for _ in range(1 + count):
        dist.barrier()
        start = perf_counter()
        engine.step(batch, NextTokenLoss())
        dist.barrier()
        times.append(perf_counter() - start)
    del engine
    gc.collect()
    return times[1:]


def peak_memory(job: dict[str, Any], split: dict[str, Any]) -> dict[str, int]:
    """Peak bytes of an update in the process that holds most: tensors, and all memory.

    Tensors are allocations of torch since before the engine was built; its own and gloo's needs are
    only in the process memory. The profiler does not see frees in gloo's thread, so the update that
    grows least counts.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        groups = connect(Layout(**split["layout"]), device="cpu")
        engine, batch = build_engine(job, split["settings"], groups)
        with keep_reduced_tensors():
            engine.step(batch, NextTokenLoss())
            for _ in range(UPDATES):
                with record_function("update"):
                    engine.step(batch, NextTokenLoss())
    events = record.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    changes += [(event.start_ns(), 0) for event in events if event.name() == "update"]
    current, peaks, bases = 0, [0], list[int]()
    for _, size in sorted(changes):
        if size == 0:  # the start of an update
            bases.append(current)
            peaks.append(current)
        current += size
        peaks[-1] = max(peaks[-1], current)
    growth = min(peak - base for peak, base in zip(peaks[1:], bases, strict=True))
    totals = torch.tensor([min(bases) + growth, status("VmHWM") - before])
    dist.all_reduce(totals, op=dist.ReduceOp.MAX)
    return dict(zip(("tensors", "process"), map(int, totals), strict=True))


@contextlib.contextmanager
def keep_reduced_tensors() -> Iterator[None]:
    """Keep reduced tensors alive in this thread until the next all-reduce.

    The profiler does not see frees in gloo's thread, which sometimes holds the last reference.
    """
    send, last = dist.all_reduce, deque[torch.Tensor](maxlen=1)

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        result = send(tensor, *arguments, **options)
        last.append(tensor)
        return result

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = send


def status(name: str) -> int:
    """Bytes of this process, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def plan_case(case: dict[str, Any], cluster: Cluster) -> Plan:
    """A plan of all layouts of a random model within its budget."""
    options = Options(
        "llama",
        model_config=case["model"],
        batch_size=case["batch_size"],
        sequence_length=case["sequence_length"],
        device="cpu",
    )
    if case["room"] is not None:
        sharded = evolve(options, microbatch_size=1, sharding="zero3")
        ranks = math.gcd(case["processes"], case["batch_size"])
        (rank,) = run_memory(sharded, Layout(data=ranks))
        options = evolve(options, memory_gib=case["room"] * rank.total / GIB)
    return plan(options, cluster, best=ALL, every=True, history=History())


def compare_case(seed: int, case: dict[str, Any], candidates: Plan) -> dict[str, Any]:
    """A plan and the measurements of its candidates."""
    predicted = [candidate.step.total for candidate in candidates.best]
    splits = [
        {"layout": candidate.layout, "settings": candidate.settings, "predicted": seconds}
        for candidate, seconds in zip(candidates.best, predicted, strict=True)
    ]
    memory = run_workers(case["processes"], peak_memory, case, splits[0])
    times = [min(seconds) for seconds in measure_candidates(case, splits)]
    return {
        "seed": seed,
        **case,
        "splits": len(splits),
        "over_best": times[0] / min(times) - 1,
        "rank_correlation": correlation(predicted, times),
        "predicted_over_measured": median(p / t for p, t in zip(predicted, times, strict=True)),
        "budget_gib": candidates.limit_bytes / USABLE / GIB,
        "predicted_gib": candidates.best[0].peak_bytes / GIB,
        "held_gib": memory["tensors"] / GIB,
        "process_gib": memory["process"] / GIB,
        "chosen": str(Layout(**candidates.best[0].layout)),
        "each": [
            {"layout": str(Layout(**c.layout)), **c.settings, "predicted": p, "measured": t}
            for c, p, t in zip(candidates.best, predicted, times, strict=True)
        ],
    }


def timed_plan(case: dict[str, Any], path: Path) -> tuple[Plan | ConfigError, float]:
    """A plan or its error, and the seconds it took."""
    torch.set_num_threads(1)
    start = perf_counter()
    try:
        result: Plan | ConfigError = plan_case(case, read_cluster(path))
    except ConfigError as error:
        result = error
    return result, perf_counter() - start


def pairs(
    seeds: Sequence[int], processes: Sequence[int], at_once: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Cases, planned `at_once` in parallel and measured one after another; errors are printed.

    Planning is timed per process, so parallel plans do not disturb it while each has a core.
    """
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(seeds), at_once):
        cases = [(seed, draw(seed, processes)) for seed in seeds[first : first + at_once]]
        paths = [folder / f"{case['processes']}.toml" for _, case in cases]
        for path, (_, case) in zip(paths, cases, strict=True):
            if not path.exists():
                run_workers(case["processes"], measure, str(path))
        with ProcessPoolExecutor(at_once, mp_context=context) as pool:
            plans = list(pool.map(timed_plan, [case for _, case in cases], paths))
        for (seed, case), (planned_case, seconds) in zip(cases, plans, strict=True):
            try:
                if isinstance(planned_case, ConfigError):
                    raise planned_case
                yield {**compare_case(seed, case, planned_case), "planning_s": seconds}
            except ConfigError as error:
                print(f"{seed}: {error}", flush=True)


def correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    if len(first) < 3:
        return 1.0
    orders = [sorted(range(len(values)), key=values.__getitem__) for values in (first, second)]
    ranks = torch.zeros(2, len(first), dtype=torch.float64)
    for row, order in zip(ranks, orders, strict=True):
        row[torch.tensor(order)] = torch.arange(len(first), dtype=torch.float64)
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> int:
    """Print a line per case and a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="seed of the first pair")
    parser.add_argument("--processes", type=int, nargs="+", default=[4, 6], help="drawn from")
    parser.add_argument(
        "--at-once", type=int, default=len(os.sched_getaffinity(0)), help="plans made at once"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(options.first, options.first + options.pairs)
        for case in pairs(seeds, options.processes, options.at_once, Path(folder)):
            results.append(case)
            print(
                f"{case['seed']:>3}  {case['processes']} processes, {case['splits']:>3} splits:"
                f" chosen {case['chosen']}, {100 * case['over_best']:.1f}% over the best; rank"
                f" correlation {case['rank_correlation']:.3f}; predicted"
                f" {case['predicted_over_measured']:.2f} of measured; holds"
                f" {case['held_gib']:.4f} (predicted {case['predicted_gib']:.4f})"
                f" of {case['budget_gib']:.4f} GiB;"
                f" planned in {case['planning_s']:.0f} s",
                flush=True,
            )
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
    near_best = sum(case["over_best"] <= 0.05 for case in results)
    fits = sum(case["held_gib"] <= case["budget_gib"] for case in results)
    median_correlation = (
        median(case["rank_correlation"] for case in results) if results else math.nan
    )
    print(
        f"{len(results)} pairs: {near_best} within 5% of the best, {fits} within their memory;"
        f" median rank correlation {median_correlation:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

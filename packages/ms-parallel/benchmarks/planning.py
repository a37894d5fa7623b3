"""Holds plans against every split of drawn models, measured: time, order, and memory.

    OMP_NUM_THREADS=1 python packages/ms-parallel/benchmarks/planning.py --json planning.json

A pair is a model, a batch and a budget of memory, on a few gloo processes of this machine, whose
links and rates are measured first. A plan finds the best settings of every layout with every size
of microbatches that fits; all of these are then run by real processes, one start of them for each
layout, twice, there and back again, short steps more often than long ones; the fastest of its steps
counts, as a busy machine only ever adds.
Printed are how much longer the chosen one takes than the best of all, the rank correlation of
predicted and measured steps, and what the tensors of the chosen one hold beside its budget.
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
"""Times the best of all beyond which layouts are not run again."""
LEAST_STEPS, MOST_STEPS, TURN_S = 2, 24, 0.6
"""Steps of a turn: as many as are predicted to take so long together."""
UPDATES = 4
"""Whose memory is counted."""
PATIENCE_S = 900
PRELOADED = ["torch._dynamo", "ms_parallel.engine.engine", "ms_profile.doctor.cluster"]
GIB = 1 << 30
ALL = 1000
ROOMS = (None, 1.5, 1.1)
"""Memory that may be taken, in what rows one by one need where as many data ranks as divide the
batch shard all; None: any."""


def draw(seed: int, processes: Sequence[int]) -> dict[str, Any]:
    """A model, its batch, and how many processes and splits there are room for."""
    drawn = random.Random(seed)
    hidden = drawn.choice((128, 192, 256))
    model = {
        "hidden_size": hidden,
        "intermediate_size": drawn.choice((2, 3)) * hidden,
        "num_hidden_layers": drawn.choice((4, 6, 8)),
        "num_attention_heads": 8,
        "num_key_value_heads": drawn.choice((4, 8)),
        "vocab_size": drawn.choice((512, 2048, 8192)),
    }
    return {
        "processes": drawn.choice(processes),
        "model": model,
        "batch_size": drawn.choice((4, 8)),
        "sequence_length": drawn.choice((64, 128)),
        "room": drawn.choice(ROOMS),
    }


def run_workers(processes: int, target: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 of so many fresh processes answers, forked from one that has imported torch."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*PRELOADED, "__main__"])
    answers = forks.Queue()
    group = (processes, store.port, answers)
    ranks = [
        forks.Process(target=work, args=(rank, *group, target, *arguments))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    answer: Any = None
    began = perf_counter()
    while any(rank.is_alive() for rank in ranks):
        with contextlib.suppress(queue.Empty):
            answer = answers.get(timeout=0.05)
        late = perf_counter() - began > PATIENCE_S
        if late or any(rank.exitcode for rank in ranks):
            break
    with contextlib.suppress(queue.Empty):
        answer = answers.get(timeout=0.05) if answer is None else answer
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(codes) or None in codes:
        raise ConfigError(f"ranks ended with {codes}: {arguments}")
    return answer


def work(
    rank: int,
    processes: int,
    port: int,
    answers: "multiprocessing.Queue[Any]",
    target: Callable[..., Any],
    *arguments: Any,
) -> None:
    """One process's part."""
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo")
    answer = target(*arguments)
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def measure(path: str) -> bool:
    """Write the file of the cluster that these processes are."""
    cluster = measured_cluster(torch.device("cpu"))
    if cluster is not None:
        write_cluster(Path(path), cluster)
    return True


def timed(job: dict[str, Any], splits: list[dict[str, Any]], layout: Layout) -> list[list[float]]:
    """Seconds of steps of each split of one layout."""
    groups = connect(layout, device="cpu")
    return [
        steps(
            job,
            split["settings"],
            groups,
            min(MOST_STEPS, max(LEAST_STEPS, int(TURN_S / split["predicted"]))),
        )
        for split in splits
    ]


def measured(job: dict[str, Any], splits: list[dict[str, Any]]) -> list[list[float]]:
    """Each split's seconds of steps, there and back again; once if all its layout's are `SLOW`.

    Each layout has processes of its own: threads of gloo's groups that nobody uses wake a hundred
    times a second, and take from those that do.
    """
    layouts: dict[Layout, list[int]] = {}
    for number, split in enumerate(splits):
        layouts.setdefault(Layout(**split["layout"]), []).append(number)
    times: list[list[float]] = [[] for _ in splits]
    for layout, numbers in [*layouts.items(), *reversed(layouts.items())]:
        if times[numbers[0]]:
            best = min(min(each) for each in times)
            if min(min(times[number]) for number in numbers) > SLOW * best:
                continue
            numbers = numbers[::-1]
        chosen = [splits[number] for number in numbers]
        found = run_workers(job["processes"], timed, job, chosen, layout)
        for number, each in zip(numbers, found, strict=True):
            times[number] += each
    return times


def started(
    job: dict[str, Any], settings: dict[str, Any], groups: Groups
) -> tuple[Engine, dict[str, torch.Tensor]]:
    """An engine, and its rows."""
    config = architecture("llama", job["model"])
    engine = Engine(config, groups=groups, **settings)
    generator = torch.Generator().manual_seed(0)
    rows = job["batch_size"] // groups.layout.data_ranks
    text = torch.randint(
        0, config.vocab_size, (rows, job["sequence_length"] + 1), generator=generator
    )
    return engine, {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def steps(job: dict[str, Any], settings: dict[str, Any], groups: Groups, count: int) -> list[float]:
    """Seconds of steps, after one that is not timed."""
    engine, batch = started(job, settings, groups)
    times = []
    for _ in range(1 + count):
        dist.barrier()
        began = perf_counter()
        engine.step(batch, NextTokenLoss())
        dist.barrier()
        times.append(perf_counter() - began)
    del engine
    gc.collect()
    return times[1:]


def most_held(job: dict[str, Any], split: dict[str, Any]) -> dict[str, int]:
    """Bytes of the process that holds most in an update: tensors, and all its memory.

    Tensors are what torch has taken since before it built an engine; what it and gloo take for
    themselves is in the process's own memory alone. Gloo's thread, whose frees the profiler does
    not see, may free a pipeline's messages: the update that grows least counts.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        groups = connect(Layout(**split["layout"]), device="cpu")
        engine, batch = started(job, split["settings"], groups)
        with freed_here():
            engine.step(batch, NextTokenLoss())
            for _ in range(UPDATES):
                with record_function("update"):
                    engine.step(batch, NextTokenLoss())
    events = watched.profiler.kineto_results.events()
    taken = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    taken += [(each.start_ns(), 0) for each in events if each.name() == "update"]
    now, peaks, bases = 0, [0], list[int]()
    for _, size in sorted(taken):
        if size == 0:
            bases.append(now)
            peaks.append(now)
        now += size
        peaks[-1] = max(peaks[-1], now)
    grown = min(peak - base for peak, base in zip(peaks[1:], bases, strict=True))
    held = torch.tensor([min(bases) + grown, status("VmHWM") - before])
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return dict(zip(("tensors", "process"), map(int, held), strict=True))


@contextlib.contextmanager
def freed_here() -> Iterator[None]:
    """Have this thread be the last that has what is summed.

    The profiler does not see what gloo's own thread frees, which is the last at times.
    """
    send, kept = dist.all_reduce, deque[torch.Tensor](maxlen=1)

    def keep(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent = send(tensor, *arguments, **options)
        kept.append(tensor)
        return sent

    dist.all_reduce = keep
    try:
        yield
    finally:
        dist.all_reduce = send


def status(name: str) -> int:
    """Bytes of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def planned(drawn: dict[str, Any], cluster: Cluster) -> Plan:
    """Every split of a drawn model, within its budget."""
    asked = Options(
        "llama",
        model_config=drawn["model"],
        batch_size=drawn["batch_size"],
        sequence_length=drawn["sequence_length"],
        device="cpu",
    )
    if drawn["room"] is not None:
        sharded = evolve(asked, microbatch_size=1, sharding="zero3")
        ranks = math.gcd(drawn["processes"], drawn["batch_size"])
        (rank,) = run_memory(sharded, Layout(data=ranks))
        asked = evolve(asked, memory_gib=drawn["room"] * rank.total / GIB)
    return plan(asked, cluster, best=ALL, every=True, history=History())


def compared(seed: int, drawn: dict[str, Any], found: Plan) -> dict[str, Any]:
    """A plan beside what its splits take."""
    predicted = [each.step.total for each in found.best]
    splits = [
        {"layout": one.layout, "settings": one.settings, "predicted": seconds}
        for one, seconds in zip(found.best, predicted, strict=True)
    ]
    held = run_workers(drawn["processes"], most_held, drawn, splits[0])
    times = [min(each) for each in measured(drawn, splits)]
    return {
        "seed": seed,
        **drawn,
        "splits": len(splits),
        "over_best": times[0] / min(times) - 1,
        "rank_correlation": correlation(predicted, times),
        "predicted_over_measured": median(p / t for p, t in zip(predicted, times, strict=True)),
        "budget_gib": found.limit_bytes / USABLE / GIB,
        "predicted_gib": found.best[0].peak_bytes / GIB,
        "held_gib": held["tensors"] / GIB,
        "process_gib": held["process"] / GIB,
        "chosen": str(Layout(**found.best[0].layout)),
        "each": [
            {"layout": str(Layout(**one.layout)), **one.settings, "predicted": p, "measured": t}
            for one, p, t in zip(found.best, predicted, times, strict=True)
        ],
    }


def timed_plan(drawn: dict[str, Any], path: Path) -> tuple[Plan | ConfigError, float]:
    """A plan, or what is wrong, and the seconds that it took."""
    torch.set_num_threads(1)
    began = perf_counter()
    try:
        found: Plan | ConfigError = planned(drawn, read_cluster(path))
    except ConfigError as error:
        found = error
    return found, perf_counter() - began


def pairs(
    seeds: Sequence[int], processes: Sequence[int], at_once: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Pairs, planned so many at once and measured one by one; a line for each that there is not.

    A plan counts the time of its own process, so that those beside it do not matter while each has
    a core.
    """
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(seeds), at_once):
        some = [(seed, draw(seed, processes)) for seed in seeds[first : first + at_once]]
        paths = [folder / f"{drawn['processes']}.toml" for _, drawn in some]
        for path, (_, drawn) in zip(paths, some, strict=True):
            if not path.exists():
                run_workers(drawn["processes"], measure, str(path))
        with ProcessPoolExecutor(at_once, mp_context=context) as pool:
            plans = list(pool.map(timed_plan, [drawn for _, drawn in some], paths))
        for (seed, drawn), (found, seconds) in zip(some, plans, strict=True):
            try:
                if isinstance(found, ConfigError):
                    raise found
                yield {**compared(seed, drawn, found), "planning_s": seconds}
            except ConfigError as error:
                print(f"{seed}: {error}", flush=True)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: of the places of numbers in their orders."""
    if len(one) < 3:
        return 1.0
    places = [sorted(range(len(each)), key=each.__getitem__) for each in (one, other)]
    ranks = torch.zeros(2, len(one), dtype=torch.float64)
    for row, order in zip(ranks, places, strict=True):
        row[torch.tensor(order)] = torch.arange(len(one), dtype=torch.float64)
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> int:
    """Print a line for each pair, and all in all."""
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
        for one in pairs(seeds, options.processes, options.at_once, Path(folder)):
            results.append(one)
            print(
                f"{one['seed']:>3}  {one['processes']} processes, {one['splits']:>3} splits: chosen"
                f" {one['chosen']}, {100 * one['over_best']:.1f}% over the best; rank correlation"
                f" {one['rank_correlation']:.3f}; predicted {one['predicted_over_measured']:.2f}"
                f" of measured; holds {one['held_gib']:.4f} (predicted {one['predicted_gib']:.4f})"
                f" of {one['budget_gib']:.4f} GiB;"
                f" planned in {one['planning_s']:.0f} s",
                flush=True,
            )
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1))
    within = sum(one["over_best"] <= 0.05 for one in results)
    fits = sum(one["held_gib"] <= one["budget_gib"] for one in results)
    middle = median(one["rank_correlation"] for one in results) if results else math.nan
    print(
        f"{len(results)} pairs: {within} within 5% of the best, {fits} within their memory; median"
        f" rank correlation {middle:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

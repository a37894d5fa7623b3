"""linear_cross_entropy beside torch's ways on this CPU: time, memory, loss; see README.md.

python benchmarks/peers.py [--rounds 3] [--rows 4096 --width 512 --classes 32768] [--json]

Each pass runs in a process of its own, forward and backward after a warm-up, the ways in turn,
round after round. Time is the process's own CPU time on one thread, which other load stretches
little; memory is the process's peak beyond what it held before the pass. Exits with 1 where ours
is slower than the plain way, or takes more than a fifth of its extra memory.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import ms_kernels

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

OURS = "ms_kernels.linear_cross_entropy"
COMPILED = "torch.compile of the plain way"
PLAIN = "plain: F.cross_entropy(hidden @ weight.T)"


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets)


def per_token(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ms_kernels.linear_cross_entropy(hidden, weight, targets, reduction="none").mean()


def ways() -> dict[str, Loss]:
    """Return every way to the same loss, by name."""
    found: dict[str, Loss] = {
        PLAIN: plain,
        OURS: ms_kernels.linear_cross_entropy,
        "the same, a loss a token, then the mean": per_token,
        COMPILED: torch.compile(plain),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        chunked = torch.nn.LinearCrossEntropyOptions()
        found["F.linear_cross_entropy"] = F.linear_cross_entropy
        found["F.linear_cross_entropy, chunked"] = lambda hidden, weight, targets: (
            F.linear_cross_entropy(hidden, weight, targets, options=chunked)
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3, help="passes of each way (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.rows, options.width, options.classes
    if options.one:
        way, whole = ways()[options.one], options.one == COMPILED
        print(json.dumps(one_pass(way, *sizes, warm_rows=options.rows if whole else 64)))
        return 0
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in ways()}
    for _ in range(options.rounds):
        for name, found in passes.items():
            found.append(in_own_process(name, sizes))
    rows = [summary(name, found) for name, found in passes.items()]
    return tell(rows, sizes, options.json)


def in_own_process(name: str, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Run one pass of a way and return what it measured."""
    flags = zip(("--rows", "--width", "--classes"), map(str, sizes), strict=True)
    command = [sys.executable, __file__, "--one", name, *(word for pair in flags for word in pair)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def one_pass(way: Loss, rows: int, width: int, classes: int, *, warm_rows: int) -> dict[str, float]:
    """Measure one pass, forward and backward, after one that counts for nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(classes, (rows,))
    # What is compiled is compiled for its sizes; the others warm up on a few rows.
    way(hidden[:warm_rows], weight, targets[:warm_rows]).backward()  # type: ignore[no-untyped-call]
    hidden.grad = weight.grad = None
    before = held_mib()
    wall, start = time.perf_counter(), time.process_time()
    loss = way(hidden, weight, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    took = time.process_time() - start
    return {
        "cpu_s": took,
        "wall_s": time.perf_counter() - wall,
        "extra_mib": peak_mib() - before,
        "loss": loss.item(),
    }


def held_mib() -> float:
    """Forget the process's peak where the system can, and return what it holds now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak_mib()


def peak_mib() -> float:
    """Return the most memory that the process held since then."""
    try:
        return _status("VmHWM")
    except OSError:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise LookupError(key)


def summary(name: str, found: list[dict[str, float]]) -> dict[str, object]:
    """Return the medians of a way's passes."""
    median = {key: statistics.median(each[key] for each in found) for key in found[0]}
    least, most = min(each["cpu_s"] for each in found), max(each["cpu_s"] for each in found)
    return {"way": name, **median, "least_cpu_s": least, "most_cpu_s": most}


def tell(rows: list[dict[str, object]], sizes: tuple[int, int, int], as_json: bool) -> int:
    """Print what was measured and whether the promise holds; return the exit code."""
    by_way = {row["way"]: row for row in rows}
    time_ratio = by_way[OURS]["cpu_s"] / by_way[PLAIN]["cpu_s"]  # type: ignore[operator]
    memory_ratio = by_way[OURS]["extra_mib"] / by_way[PLAIN]["extra_mib"]  # type: ignore[operator]
    holds = time_ratio <= 1 and memory_ratio <= 0.2
    if as_json:
        facts = {"torch": torch.__version__, "sizes": sizes, "ways": rows, "holds": holds}
        print(json.dumps(facts, indent=2))
        return 0 if holds else 1
    print(f"linear_cross_entropy {' x '.join(map(str, sizes))}, float32, forward and backward")
    print(f"torch {torch.__version__}, one thread; medians, and the spread of CPU time\n")
    for row in rows:
        print(
            f"  {row['way']:<42} {row['cpu_s']:6.2f} s CPU ({row['least_cpu_s']:.2f} to "
            f"{row['most_cpu_s']:.2f}) {row['extra_mib']:6.0f} MiB  loss {row['loss']:.5f}"
        )
    print("  Liger 0.8.5 is Triton alone and cannot run on a CPU.")
    print(f"\nours / plain: time {time_ratio:.2f}, extra memory {memory_ratio:.2f}", end="; ")
    print("holds" if holds else "DOES NOT HOLD (time up to 1, memory up to 0.2)")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

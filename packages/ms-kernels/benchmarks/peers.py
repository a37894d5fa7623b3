"""Compare linear_cross_entropy with torch on this CPU: time, memory, loss; see README.md.

python benchmarks/peers.py [--rounds 3] [--rows 4096 --width 512 --classes 32768] [--json]

Each pass runs forward and backward in a fresh process after a warm-up; methods alternate round by
round. Time is the process's CPU time on one thread, which other load affects little. Memory is the
process's peak above its usage before the pass. Exits with 1 if ours is slower than the plain
method or takes more than a fifth of its extra memory.
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
COMPILED = "torch.compile of the plain method"
PLAIN = "plain: F.cross_entropy(hidden @ weight.T)"


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets)


def per_token(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return ms_kernels.linear_cross_entropy(hidden, weight, targets, reduction="none").mean()


def methods() -> dict[str, Loss]:
    """Return every method of computing the same loss, by name."""
    losses: dict[str, Loss] = {
        PLAIN: plain,
        OURS: ms_kernels.linear_cross_entropy,
        "the same, one loss per token, then the mean": per_token,
        COMPILED: torch.compile(plain),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        chunked = torch.nn.LinearCrossEntropyOptions()
        losses["F.linear_cross_entropy"] = F.linear_cross_entropy
        losses["F.linear_cross_entropy, chunked"] = lambda hidden, weight, targets: (
            F.linear_cross_entropy(hidden, weight, targets, options=chunked)
        )
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3, help="passes per method (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.rows, options.width, options.classes
    if options.one:
        method, full_warmup = methods()[options.one], options.one == COMPILED
        print(json.dumps(one_pass(method, *sizes, warm_rows=options.rows if full_warmup else 64)))
        return 0
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in methods()}
    for _ in range(options.rounds):
        for name, measurements in passes.items():
            measurements.append(run_in_subprocess(name, sizes))
    rows = [summary(name, measurements) for name, measurements in passes.items()]
    return print_report(rows, sizes, options.json)


def run_in_subprocess(name: str, sizes: tuple[int, int, int]) -> dict[str, float]:
    """Run one pass of a method in a fresh process and return its measurements."""
    flags = zip(("--rows", "--width", "--classes"), map(str, sizes), strict=True)
    command = [sys.executable, __file__, "--one", name, *(arg for pair in flags for arg in pair)]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measurement: dict[str, float] = json.loads(process.stdout)
    return measurement


def one_pass(
    method: Loss, rows: int, width: int, classes: int, *, warm_rows: int
) -> dict[str, float]:
    """Measure one forward and backward pass after a warm-up pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(classes, (rows,))
    # Compiled methods warm up at full size, the others on a few rows.
    method(hidden[:warm_rows], weight, targets[:warm_rows]).backward()  # type: ignore[no-untyped-call]
    hidden.grad = weight.grad = None
    baseline = reset_peak_mib()
    wall, start = time.perf_counter(), time.process_time()
    loss = method(hidden, weight, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    cpu_s = time.process_time() - start
    return {
        "cpu_s": cpu_s,
        "wall_s": time.perf_counter() - wall,
        "extra_mib": peak_mib() - baseline,
        "loss": loss.item(),
    }


def reset_peak_mib() -> float:
    """Reset the process's peak memory where supported, and return its current usage."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return peak_mib()


def peak_mib() -> float:
    """Return the peak memory of the process since the reset."""
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


def summary(name: str, passes: list[dict[str, float]]) -> dict[str, object]:
    """Return the medians over a method's passes."""
    median = {
        key: statistics.median(measurement[key] for measurement in passes) for key in passes[0]
    }
    fastest, slowest = (
        min(measurement["cpu_s"] for measurement in passes),
        max(measurement["cpu_s"] for measurement in passes),
    )
    return {"way": name, **median, "least_cpu_s": fastest, "most_cpu_s": slowest}


def print_report(rows: list[dict[str, object]], sizes: tuple[int, int, int], as_json: bool) -> int:
    """Print the measurements and whether the promise holds; return the exit code."""
    by_method = {row["way"]: row for row in rows}
    time_ratio = by_method[OURS]["cpu_s"] / by_method[PLAIN]["cpu_s"]  # type: ignore[operator]
    memory_ratio = by_method[OURS]["extra_mib"] / by_method[PLAIN]["extra_mib"]  # type: ignore[operator]
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
    print("  Liger 0.8.5 supports only Triton and cannot run on a CPU.")
    print(f"\nours / plain: time {time_ratio:.2f}, extra memory {memory_ratio:.2f}", end="; ")
    print("holds" if holds else "DOES NOT HOLD (time up to 1, memory up to 0.2)")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time the operators on this machine against plain torch and torch's fused versions; see README.md.

python benchmarks/bench.py            # about a minute
python benchmarks/bench.py --full     # linear_cross_entropy of 4096 x 512 x 32768
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import ms_kernels
from ms_kernels.core.choice import obstacle_to
from ms_kernels.core.dispatch import describe_call, implementation
from ms_kernels.operators import CONTRACTS, IMPLEMENTATIONS

ROWS = {
    "rms_norm": {"...": 4096, "H": 1024},
    "rotary": {"B": 4, "S": 512, "Hq": 16, "Hk": 8, "D": 64, "R/2": 32},
    "swiglu": {"...": 4096, "I": 1408},
    "attention": {"B": 2, "Sq": 1024, "Sk": 1024, "Hq": 8, "Hk": 4, "D": 64},
    "cross_entropy": {"...": 1024, "V": 16384},
    "linear_cross_entropy": {"...": 1024, "H": 256, "V": 8192},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the large linear_cross_entropy")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = (4096, 512, 32768) if options.full else (2048, 512, 16384)
    facts = {
        "torch": torch.__version__,
        "threads": options.threads,
        "linear_cross_entropy": bench_losses(*sizes, options.rounds),
        "operators": bench_operators(options.rounds),
        "overhead_us": bench_overhead(),
    }
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts, sizes)


def bench_losses(rows: int, width: int, classes: int, rounds: int) -> list[dict[str, object]]:
    """Time forward and backward of each method alternately, with peak memory above the inputs."""
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(classes, (rows,))
    prompts = targets.clone()
    prompts[: rows * 3 // 4] = -100
    methods: dict[str, Callable[[], Tensor]] = {
        "plain: F.cross_entropy(hidden @ weight.T)": lambda: F.cross_entropy(
            hidden @ weight.T, targets
        ),
        "ms_kernels.linear_cross_entropy": lambda: ms_kernels.linear_cross_entropy(
            hidden, weight, targets
        ),
        "the same, one loss per token, then the mean": lambda: ms_kernels.linear_cross_entropy(
            hidden, weight, targets, reduction="none"
        ).mean(),
        "the same, 3/4 of targets ignored": lambda: ms_kernels.linear_cross_entropy(
            hidden, weight, prompts
        ),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        methods["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, targets)
        chunked = torch.nn.LinearCrossEntropyOptions()
        methods["F.linear_cross_entropy, chunked"] = lambda: F.linear_cross_entropy(
            hidden, weight, targets, options=chunked
        )
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    extra_mib: dict[str, float] = {}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for name, method in methods.items():
            hidden.grad = weight.grad = None
            baseline = reset_peak_mib()
            start = time.perf_counter()
            loss = method()
            loss.backward()  # type: ignore[no-untyped-call]
            seconds[name].append(time.perf_counter() - start)
            extra_mib[name] = peak_mib() - baseline
            losses[name] = loss.item()
    return [
        {
            "way": name,
            "best_s": min(seconds[name]),
            "median_s": statistics.median(seconds[name]),
            "extra_mib": extra_mib[name],
            "loss": losses[name],
        }
        for name in methods
    ]


def reset_peak_mib() -> float:
    """Reset the process's peak memory and return its current usage."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_mib() -> float:
    """Return the peak memory of the process since the last reset."""
    return _status("VmHWM")


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise LookupError(key)


def bench_operators(rounds: int) -> list[dict[str, object]]:
    """Time every implementation that supports the call, forward and forward with backward."""
    rows: list[dict[str, object]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for operator, dims in ROWS.items():
            contract = CONTRACTS[operator]
            without = [argument.name for argument in contract.arguments if argument.optional]
            example = contract.draw(dims, dtype=dtype)
            inputs = tuple(None if name in without else tensor for name, tensor in example.items())
            options = tuple(option.default for option in contract.options)
            call = describe_call(contract, inputs, options)
            runs = {
                impl.backend: impl.run
                for impl in IMPLEMENTATIONS
                if impl.operator == operator and obstacle_to(impl, call) is None
            }
            best: dict[str, list[float]] = {name: [1e9, 1e9] for name in runs}
            for _ in range(rounds + 1):  # the first round warms up
                for name, run in runs.items():
                    for index, backward in enumerate((False, True)):
                        seconds = _time(contract, run, inputs, options, backward)
                        best[name][index] = min(best[name][index], seconds)
            rows += [
                {
                    "operator": operator,
                    "dtype": str(dtype).removeprefix("torch."),
                    "backend": name,
                    "forward_ms": 1e3 * forward,
                    "both_ms": 1e3 * both,
                }
                for name, (forward, both) in best.items()
            ]
    return rows


def _time(contract, run, inputs, options, backward: bool) -> float:  # type: ignore[no-untyped-def]
    """Return the seconds of one pass."""
    leaves = [
        None
        if tensor is None
        else tensor.detach().requires_grad_(backward and argument.differentiable)
        for argument, tensor in zip(contract.arguments, inputs, strict=True)
    ]
    start = time.perf_counter()
    result = run(*leaves, *options)
    result = result if isinstance(result, tuple) else (result,)
    if backward:
        differentiable = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        torch.autograd.grad(result, differentiable, [torch.ones_like(part) for part in result])
    return time.perf_counter() - start


def bench_overhead() -> dict[str, float]:
    """Measure the cost of argument checks and dispatch for a repeated call."""
    overhead_us = {}
    for operator, contract in CONTRACTS.items():
        inputs = tuple(contract.draw({}).values())
        options = tuple(option.default for option in contract.options)
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(2000):
                implementation(contract, inputs, options)
            best = min(best, (time.perf_counter() - start) / 2000)
        overhead_us[operator] = 1e6 * best
    return overhead_us


def show(facts, sizes) -> None:  # type: ignore[no-untyped-def]
    print(f"torch {facts['torch']}, {facts['threads']} thread(s)\n")
    print(f"linear_cross_entropy {' x '.join(map(str, sizes))}, float32, forward and backward")
    for row in facts["linear_cross_entropy"]:
        print(
            f"  {row['way']:<42} {row['best_s']:6.2f} s best {row['median_s']:6.2f} s median"
            f" {row['extra_mib']:6.0f} MiB  loss {row['loss']:.5f}"
        )
    print("\noperators, best ms: forward / forward and backward")
    for row in facts["operators"]:
        print(
            f"  {row['operator']:<21} {row['dtype']:<9} {row['backend']:<10}"
            f" {row['forward_ms']:8.2f} / {row['both_ms']:8.2f}"
        )
    print("\nargument checks and dispatch, µs per call")
    for operator, microseconds in facts["overhead_us"].items():
        print(f"  {operator:<21} {microseconds:.1f}")


if __name__ == "__main__":
    main()

"""What the operators cost on this machine, beside the plain way and torch's own; see README.md.

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
    """Time forward and backward of each way in turn, and its peak memory beyond the inputs."""
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(classes, (rows,))
    prompts = targets.clone()
    prompts[: rows * 3 // 4] = -100
    ways: dict[str, Callable[[], Tensor]] = {
        "plain: F.cross_entropy(hidden @ weight.T)": lambda: F.cross_entropy(
            hidden @ weight.T, targets
        ),
        "ms_kernels.linear_cross_entropy": lambda: ms_kernels.linear_cross_entropy(
            hidden, weight, targets
        ),
        "the same, a loss a token, then the mean": lambda: ms_kernels.linear_cross_entropy(
            hidden, weight, targets, reduction="none"
        ).mean(),
        "the same, 3/4 of targets ignored": lambda: ms_kernels.linear_cross_entropy(
            hidden, weight, prompts
        ),
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13 and later
        ways["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, targets)
        chunked = torch.nn.LinearCrossEntropyOptions()
        ways["F.linear_cross_entropy, chunked"] = lambda: F.linear_cross_entropy(
            hidden, weight, targets, options=chunked
        )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    extra_mib: dict[str, float] = {}
    losses: dict[str, float] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            hidden.grad = weight.grad = None
            before = reset_peak_mib()
            start = time.perf_counter()
            loss = way()
            loss.backward()  # type: ignore[no-untyped-call]
            seconds[name].append(time.perf_counter() - start)
            extra_mib[name] = peak_mib() - before
            losses[name] = loss.item()
    return [
        {
            "way": name,
            "best_s": min(seconds[name]),
            "median_s": statistics.median(seconds[name]),
            "extra_mib": extra_mib[name],
            "loss": losses[name],
        }
        for name in ways
    ]


def reset_peak_mib() -> float:
    """Forget the process's peak memory and return what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_mib() -> float:
    """Return the most memory that the process held since the last reset."""
    return _status("VmHWM")


def _status(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise LookupError(key)


def bench_operators(rounds: int) -> list[dict[str, object]]:
    """Time every implementation that takes the call, forward and forward with backward."""
    found: list[dict[str, object]] = []
    for dtype in (torch.float32, torch.bfloat16):
        for operator, dims in ROWS.items():
            contract = CONTRACTS[operator]
            without = [each.name for each in contract.arguments if each.optional]
            drawn = contract.draw(dims, dtype=dtype)
            inputs = tuple(None if name in without else each for name, each in drawn.items())
            options = tuple(each.default for each in contract.options)
            call = describe_call(contract, inputs, options)
            runs = {
                each.backend: each.run
                for each in IMPLEMENTATIONS
                if each.operator == operator and obstacle_to(each, call) is None
            }
            best: dict[str, list[float]] = {name: [1e9, 1e9] for name in runs}
            for _ in range(rounds + 1):  # the first warms up
                for name, run in runs.items():
                    for place, backward in enumerate((False, True)):
                        took = _time(contract, run, inputs, options, backward)
                        best[name][place] = min(best[name][place], took)
            found += [
                {
                    "operator": operator,
                    "dtype": str(dtype).removeprefix("torch."),
                    "backend": name,
                    "forward_ms": 1e3 * forward,
                    "both_ms": 1e3 * both,
                }
                for name, (forward, both) in best.items()
            ]
    return found


def _time(contract, run, inputs, options, backward: bool) -> float:  # type: ignore[no-untyped-def]
    """Return the seconds of one pass."""
    leaves = [
        None if each is None else each.detach().requires_grad_(backward and argument.differentiable)
        for argument, each in zip(contract.arguments, inputs, strict=True)
    ]
    start = time.perf_counter()
    result = run(*leaves, *options)
    result = result if isinstance(result, tuple) else (result,)
    if backward:
        wanted = [each for each in leaves if each is not None and each.requires_grad]
        torch.autograd.grad(result, wanted, [torch.ones_like(each) for each in result])
    return time.perf_counter() - start


def bench_overhead() -> dict[str, float]:
    """Measure what checking and choosing cost a call that looks like one before."""
    found = {}
    for operator, contract in CONTRACTS.items():
        inputs = tuple(contract.draw({}).values())
        options = tuple(each.default for each in contract.options)
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(2000):
                implementation(contract, inputs, options)
            best = min(best, (time.perf_counter() - start) / 2000)
        found[operator] = 1e6 * best
    return found


def show(facts, sizes) -> None:  # type: ignore[no-untyped-def]
    print(f"torch {facts['torch']}, {facts['threads']} thread(s)\n")
    print(f"linear_cross_entropy {' x '.join(map(str, sizes))}, float32, forward and backward")
    for each in facts["linear_cross_entropy"]:
        print(
            f"  {each['way']:<42} {each['best_s']:6.2f} s best {each['median_s']:6.2f} s median"
            f" {each['extra_mib']:6.0f} MiB  loss {each['loss']:.5f}"
        )
    print("\noperators, best ms: forward / forward and backward")
    for each in facts["operators"]:
        print(
            f"  {each['operator']:<21} {each['dtype']:<9} {each['backend']:<10}"
            f" {each['forward_ms']:8.2f} / {each['both_ms']:8.2f}"
        )
    print("\nchecking and choosing, µs a call")
    for operator, took in facts["overhead_us"].items():
        print(f"  {operator:<21} {took:.1f}")


if __name__ == "__main__":
    main()

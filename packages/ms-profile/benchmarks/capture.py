"""Cost of capture: spans, events, and the recorder compared with torch.profiler in a training step.

Times are CPU times of the training thread, which are meaningful even on a busy host. Steps of the
compared kinds alternate in small groups; results are medians with quartiles.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import numpy as np
import torch
from torch import nn

from ms_profile import EventLog, Recorder, align_clocks, read_ring
from ms_profile.log.ring import Kind, Ring
from ms_profile.recording.scopes import INVERSE_TIME_BUDGET, MAX_STRETCH


def per_call_us(function: Callable[[], object], calls: int = 5000, rounds: int = 30) -> float:
    costs = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(calls):
            function()
        costs.append((time.thread_time() - start) / calls * 1e6)
    return statistics.median(costs)


def primitives(folder: Path) -> dict[str, float]:
    ring = Ring(folder / "a.ring")
    name = ring.name("x")
    fields = {"step": 1, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-4, "tokens": 8192}
    with EventLog(folder / "events") as log:
        event_us = per_call_us(lambda: log("step", fields), rounds=20)
    size = sum(path.stat().st_size for path in (folder / "events").iterdir())
    return {
        "clock_read_us": per_call_us(time.monotonic_ns),
        "ring_span_us": per_call_us(lambda: ring.end(ring.begin(name, Kind.MODULE))),
        "event_us": event_us,
        "event_bytes_on_disk": size / (5000 * 20),
    }


class Block(nn.Module):
    """A feed-forward block with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, W) to (B, W)."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A sequence of blocks."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, W) to (B, W)."""
        for layer in self.layers:
            x = layer(x)
        return x


class Training:
    """One model with its optimizer."""

    def __init__(self, width: int, depth: int, rows: int) -> None:
        torch.manual_seed(0)
        self.model = Net(width, depth)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(rows, width)

    def step(self) -> None:
        """Run one training step."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def group(self, steps: int, after: Callable[[], object] = lambda: None) -> float:
        """Run some steps and return the CPU seconds per step."""
        start = time.thread_time()
        for _ in range(steps):
            self.step()
            after()
        return (time.thread_time() - start) / steps


def compare_steps(folder: Path, training: Training, rounds: int, steps: int) -> dict[str, Any]:
    """Return CPU time per step without profiling, with the recorder, and inside torch.profiler."""
    plain, recorded, traced, exported = [], [], [], []
    spans = 0
    for number in range(rounds):
        plain.append(training.group(steps))
        path = folder / f"{number}.ring"
        with Recorder(path) as recorder:
            recorder.attach()
            training.group(1)  # detects the model and registers the hooks
            recorded.append(training.group(steps))
        spans = max(len(read_ring(path).spans) // (steps + 1), spans)
        path.unlink()
        plain.append(training.group(steps))
        start = time.thread_time()
        with torch.profiler.profile() as profiler:
            traced.append(training.group(steps, profiler.step))
        profiler.export_chrome_trace(str(folder / "trace.json"))
        exported.append((time.thread_time() - start) / steps)
    base = statistics.median(plain)

    def over(times: list[float]) -> list[float]:
        return [round(100 * (time / base - 1), 3) for time in statistics.quantiles(times, n=4)]

    return {
        "step_ms": round(base * 1e3, 3),
        "plain_percent": over(plain),
        "recorder_percent": over(recorded),
        "torch_profiler_percent": over(traced),
        "torch_profiler_with_export_percent": over(exported),
        "recorder_us_a_step": round((statistics.median(recorded) - base) * 1e6, 1),
        "spans_a_step": spans,
    }


def recorder_alone_us(folder: Path) -> dict[str, float]:
    """Cost of the recorder in one step of the large model, measured with empty modules.

    Modules that compute nothing leave only the calls, so the recorder's cost is measured to the
    microsecond, where the noise of a real step would hide it.
    """
    training = Training(8, 32, 1)
    for layer in training.model.layers:
        layer.forward = lambda x: x  # type: ignore[method-assign]
    training.optimizer = torch.optim.SGD([next(training.model.parameters())])
    training.batch = torch.zeros(1, 8, requires_grad=True)
    plain, recorded = [], []
    for number in range(15):
        plain.append(training.group(100))
        with Recorder(folder / f"alone-{number}.ring") as recorder:
            recorder.attach()
            training.group(1)
            recorded.append(training.group(100))
    spans = len(read_ring(folder / "alone-0.ring").spans) / 101
    cost = statistics.median(recorded) - statistics.median(plain)
    drain = drain_us(folder)
    return {
        "hooks_us_a_step_of_32_blocks": cost * 1e6,
        "spans_of_32_blocks": round(spans),
        "collecting_us": drain,
    }


def drain_us(folder: Path) -> float:
    """CPU time of collecting 100 scopes from Kineto and restarting it."""
    from ms_profile.recording.scopes import ScopeRecorder

    ring = Ring(folder / "drain.ring")
    scopes = ScopeRecorder(ring)
    costs = []
    for _ in range(50):
        scopes.start()
        for number in range(100):
            with torch.profiler.record_function(f"scope {number % 10}"):
                pass
        start = time.thread_time()
        scopes.stop()
        scopes.start()
        costs.append(time.thread_time() - start)
        scopes.stop()
    return statistics.median(costs) * 1e6


def clocks() -> dict[str, float]:
    """Errors of aligned clocks with 3 s offset, 50 ppm drift, 30 µs of noise and 3% stragglers."""
    errors = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        instants = np.linspace(0, 30e9, 500)
        ends: dict[int, dict[Any, int]] = {}
        expected: dict[int, np.ndarray] = {}
        for rank in range(8):
            offset, drift = (0.0, 0.0) if rank == 0 else random.uniform((-3e9, -5e-5), (3e9, 5e-5))
            late = random.exponential(30e3, 500) + (random.random(500) < 0.03) * 5e6
            expected[rank] = (instants + offset + drift * instants).astype(np.int64)
            noisy = ((instants + late) * (1 + drift) + offset).astype(np.int64)
            ends[rank] = dict(enumerate(noisy.tolist()))
        for rank, fit in align_clocks(ends).items():
            errors.extend(np.abs(fit.correct(expected[rank]) - expected[0]) / 1e3)
    median, p99 = np.percentile(errors, [50, 99])
    return {"clock_error_median_us": float(median), "clock_error_p99_us": float(p99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only-steps", action="store_true", help="measure only the two steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results: dict[str, Any] = recorder_alone_us(folder)
        if not options.only_steps:
            results |= primitives(folder) | clocks()
        small = Training(width=64, depth=8, rows=64)
        results["small_step"] = compare_steps(folder, small, options.rounds, 60)
        large = Training(width=384, depth=8, rows=1024)
        results["large_step"] = compare_steps(folder, large, options.rounds, 3)
    hooks_us = results["hooks_us_a_step_of_32_blocks"]
    for size in ("small_step", "large_step"):
        # Hooks and periodic collection, as measured with modules that compute nothing.
        step = results[size]
        step["recorder_own_us"] = hooks_us * step["spans_a_step"] / results["spans_of_32_blocks"]
        every_s = min(
            max(2.0, INVERSE_TIME_BUDGET * results["collecting_us"] / 1e6), 2.0 * MAX_STRETCH
        )
        step["recorder_own_us"] += results["collecting_us"] * step["step_ms"] / 1e3 / every_s
        step["recorder_own_percent"] = step["recorder_own_us"] / step["step_ms"] / 10
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()

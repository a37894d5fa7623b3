"""Benchmarks that need an accelerator, without nox: `python benchmarks/gpu.py`; about two minutes.

One table: kernel times, device time per operator, busy time and peak memory compared with
torch.profiler, `ms-profile run` on a training script, and the recorder's cost. Needs torch and the
requirements of this package, which is imported from this tree. Exits with 1 if a check fails, with
2 and one line without an accelerator.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
SOURCE = Path(__file__).parents[1] / "src"
sys.path.insert(0, str(SOURCE))

try:
    import numpy as np
    import torch
    from torch.profiler import profile, record_function

    from ms_profile import analyse, kernel_table, operator_table
    from ms_profile.analysis.memory import memory_timeline
    from ms_profile.recording.recorder import Recorder
    from ms_profile.trace.intervals import length_ns, union
except ImportError as error:
    sys.exit(f"gpu.py cannot start: {error}; pip install torch attrs msgspec numpy rich zstandard")

TOLERANCE = 0.01
STEPS = 4
SCRIPT = """
import torch
device = torch.accelerator.current_accelerator()
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(16):
    model(torch.ones(256, 512, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.accelerator.synchronize()
"""
Row = tuple[str, str, str, bool | None]


class Training:
    """A transformer encoder and its optimizer."""

    def __init__(self, device: "torch.device", width: int, depth: int, rows: int) -> None:
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, depth).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(rows, 256, width, device=device)

    def step(self) -> None:
        """Run one training step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def compare_with_torch_profiler(training: Training, folder: Path) -> list[Row]:
    """Compare our reading of a trace with torch's profiler for the same steps."""
    for _ in range(3):
        training.step()
    synchronize()
    with profile(record_shapes=True, profile_memory=True) as profiler:
        for number in range(STEPS):
            with record_function(f"ProfilerStep#{number}"):
                training.step()
                synchronize()
    path = folder / "rank-0.json"
    profiler.export_chrome_trace(str(path))
    rank_analysis = analyse(path).ranks[0]
    cpu = torch.autograd.DeviceType.CPU
    torch_events = {
        event.key: event for event in profiler.key_averages() if event.device_type == cpu
    }
    device = [
        event for event in profiler.events()
        if event.device_type != cpu and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("ProfilerStep", "Optimizer."))
    ]  # fmt: skip
    kernel_us = sum(row.total_ns for row in kernel_table(rank_analysis.trace)) / 1e3
    rows = [
        comparison_row("time of kernels and copies", kernel_us, busy_us(device, sum_up=True), "µs")
    ]
    shared = [
        (row.device_ns / 1e3, torch_events[row.name].self_device_time_total)
        for row in operator_table(rank_analysis.trace)
        if row.device_ns
        and row.name in torch_events
        and torch_events[row.name].self_device_time_total > 100
    ]
    max_error = max((abs(a / b - 1) for a, b in shared), default=None)
    rows.append(
        ("device time by operator, the worst of " + str(len(shared)),
         "not measurable" if max_error is None else f"{max_error:.3%} difference", "1%",
         None if max_error is None else max_error <= TOLERANCE)
    )  # fmt: skip
    activity = rank_analysis.activity
    parts = np.concatenate([activity.compute, activity.copy, activity.collective])
    ours_us = length_ns(union(parts[:, 0], parts[:, 1])) / 1e3
    rows.append(comparison_row("time in which the device was busy", ours_us, busy_us(device), "µs"))
    phases_complete = all(
        sum(b.phases_ns.values()) == b.step.duration_ns for b in rank_analysis.breakdowns
    )
    summary = (
        f"{len(rank_analysis.breakdowns)} of {STEPS} steps, "
        f"phases sum to wall time: {phases_complete}"
    )
    rows.append(
        ("steps", summary, "all", phases_complete and len(rank_analysis.breakdowns) == STEPS)
    )
    peaks = [
        line.high_bytes.max() for line in memory_timeline(rank_analysis.trace) if line.device >= 0
    ]
    summary = f"{max(peaks) / 2**20:.0f} MiB" if peaks else "not measurable"
    rows.append(("peak of the device's memory in the trace", summary, "", None))
    return rows


def busy_us(events: Iterable[Any], *, sum_up: bool = False) -> float:
    """Microseconds covered by device spans, or their sum, from torch's events."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    if sum_up:
        return float(sum(end - start for start, end in spans))
    covered, covered_end = 0.0, float("-inf")
    for start, end in spans:
        covered += max(end - max(start, covered_end), 0.0)
        covered_end = max(covered_end, end)
    return covered


def comparison_row(label: str, our_value: float, torch_value: float, unit: str) -> Row:
    if not torch_value:
        return label, "not measurable: torch's profiler saw no device", "1%", None
    difference = abs(our_value / torch_value - 1)
    summary = f"{our_value:.0f} {unit}; torch {torch_value:.0f} {unit}; {difference:.3%} difference"
    return label, summary, "1%", difference <= TOLERANCE


def run_command(folder: Path) -> list[Row]:
    """Run `ms-profile run` on an unmodified script."""
    script, out = folder / "train.py", folder / "out"
    script.write_text(SCRIPT)
    arguments = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    arguments += ["--output-dir", str(out), "--active", "4", "--windows", "1"]
    arguments += ["--metrics", "compute_time,memory,operators"]
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.run(
        arguments, capture_output=True, text=True, env=environment, timeout=120
    )
    if process.returncode:
        error_line = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return [("ms-profile run", f"exit code {process.returncode}: {error_line}", "0", False)]
    rank_analysis = analyse(out).ranks[0]
    kernels = sum(row.calls for row in kernel_table(rank_analysis.trace))
    summary = f"{len(rank_analysis.breakdowns)} steps, {kernels} kernels and copies"
    return [("ms-profile run, script unchanged", summary, "some", kernels > 0)]


def seconds(step: Callable[[], None], steps: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps


def overhead(training: Training, name: str, folder: Path, steps: int) -> list[Row]:
    """Compare wall times of plain, recorded and torch.profiler steps, alternating."""
    seconds(training.step, 3)
    plain, recorded, traced = [], [], []
    for number in range(8):
        plain.append(seconds(training.step, steps))
        with Recorder(folder / f"{name}-{number}.ring") as recorder:
            recorder.attach()
            seconds(training.step, 1)
            recorded.append(seconds(training.step, steps))
        with profile():
            seconds(training.step, 1)
            traced.append(seconds(training.step, steps))
    base = statistics.median(plain)
    rows: list[Row] = []
    for label, times in (("recorder", recorded), ("torch.profiler, in the step", traced)):
        low, middle, high = (100 * (t / base - 1) for t in statistics.quantiles(times, n=4))
        summary = f"{middle:+.2f}% [{low:.2f}, {high:.2f}]"
        rows.append((f"{name} step of {base * 1e3:.2f} ms: {label}", summary, "", None))
    return rows


def main() -> int:
    if not torch.accelerator.is_available():
        print("gpu.py needs an accelerator that torch can use; none is available", file=sys.stderr)
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    name = torch.get_device_module(device).get_device_name()
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    try:
        import triton

        versions.append(f"triton {triton.__version__}")
    except ImportError:
        pass
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        large = Training(device, 512, 6, 16)
        rows = compare_with_torch_profiler(large, folder) + run_command(folder)
        rows += overhead(Training(device, 64, 2, 4), "small", folder, 40)
        rows += overhead(Training(device, 1024, 24, 32), "large", folder, 3)
    print(
        f"{name}; {', '.join(versions)}\n\n| what | figure | asked for | holds |\n|---|---|---|---|"
    )
    for label, figure, target, holds in rows:
        print(
            f"| {label} | {figure} | {target} "
            f"| {'' if holds is None else 'yes' if holds else 'NO'} |"
        )
    return 1 if any(row[3] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

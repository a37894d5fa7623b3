"""What needs an accelerator, in one go without nox: `python benchmarks/gpu.py`; some two minutes.

One table: kernel times, device time by operator, busy time and peak memory beside torch.profiler's
own, `ms-profile run` on a training script, and the recorder's cost. Needs torch and this package's
own needs; the package is taken from this tree. Exits with 1 if a check does not hold, with 2 and a
line where there is no accelerator.
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
    sys.exit(f"gpu.py cannot begin: {error}; pip install torch attrs msgspec numpy rich zstandard")

AGREE = 0.01
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
        """Do one step."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def agreement(training: Training, folder: Path) -> list[Row]:
    """Our reading of a trace beside what torch's profiler says of the same steps."""
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
    one = analyse(path).ranks[0]
    cpu = torch.autograd.DeviceType.CPU
    theirs = {event.key: event for event in profiler.key_averages() if event.device_type == cpu}
    device = [
        event for event in profiler.events()
        if event.device_type != cpu and not getattr(event, "is_user_annotation", False)
        and not event.name.startswith(("ProfilerStep", "Optimizer."))
    ]  # fmt: skip
    kernel_us = sum(row.total_ns for row in kernel_table(one.trace)) / 1e3
    rows = [compared("time of kernels and copies", kernel_us, busy(device, sum_up=True), "µs")]
    shared = [
        (row.device_ns / 1e3, theirs[row.name].self_device_time_total)
        for row in operator_table(one.trace)
        if row.device_ns and row.name in theirs and theirs[row.name].self_device_time_total > 100
    ]
    worst = max((abs(a / b - 1) for a, b in shared), default=None)
    rows.append(
        ("device time by operator, the worst of " + str(len(shared)),
         "not measurable" if worst is None else f"{worst:.3%} apart", "1%",
         None if worst is None else worst <= AGREE)
    )  # fmt: skip
    activity = one.activity
    parts = np.concatenate([activity.compute, activity.copy, activity.collective])
    ours_us = length_ns(union(parts[:, 0], parts[:, 1])) / 1e3
    rows.append(compared("time in which the device was busy", ours_us, busy(device), "µs"))
    whole = all(sum(b.phases_ns.values()) == b.step.duration_ns for b in one.breakdowns)
    told = f"{len(one.breakdowns)} of {STEPS} steps, phases sum to wall time: {whole}"
    rows.append(("steps", told, "all", whole and len(one.breakdowns) == STEPS))
    peaks = [line.high_bytes.max() for line in memory_timeline(one.trace) if line.device >= 0]
    told = f"{max(peaks) / 2**20:.0f} MiB" if peaks else "not measurable"
    rows.append(("peak of the device's memory in the trace", told, "", None))
    return rows


def busy(events: Iterable[Any], *, sum_up: bool = False) -> float:
    """Microseconds that spans of a device cover, or their sum, as torch's events tell them."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    if sum_up:
        return float(sum(end - start for start, end in spans))
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def compared(what: str, ours: float, theirs: float, unit: str) -> Row:
    if not theirs:
        return what, "not measurable: torch's profiler saw no device", "1%", None
    apart = abs(ours / theirs - 1)
    told = f"{ours:.0f} {unit}; torch's {theirs:.0f} {unit}; {apart:.3%} apart"
    return what, told, "1%", apart <= AGREE


def command(folder: Path) -> list[Row]:
    """`ms-profile run` on a script that knows nothing of it."""
    script, out = folder / "train.py", folder / "out"
    script.write_text(SCRIPT)
    words = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    words += ["--output-dir", str(out), "--active", "4", "--windows", "1"]
    words += ["--metrics", "compute_time,memory,operators"]
    paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [("ms-profile run", f"exit code {done.returncode}: {last}", "0", False)]
    one = analyse(out).ranks[0]
    kernels = sum(row.calls for row in kernel_table(one.trace))
    told = f"{len(one.breakdowns)} steps, {kernels} kernels and copies"
    return [("ms-profile run, script unchanged", told, "some", kernels > 0)]


def seconds(step: Callable[[], None], steps: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps


def overhead(training: Training, name: str, folder: Path, steps: int) -> list[Row]:
    """Plain steps, recorded ones, and ones inside torch.profiler, alternating; wall time."""
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
    for what, times in (("recorder", recorded), ("torch.profiler, in the step", traced)):
        low, middle, high = (100 * (t / base - 1) for t in statistics.quantiles(times, n=4))
        told = f"{middle:+.2f}% [{low:.2f}, {high:.2f}]"
        rows.append((f"{name} step of {base * 1e3:.2f} ms: {what}", told, "", None))
    return rows


def main() -> int:
    if not torch.accelerator.is_available():
        print("gpu.py needs an accelerator that torch can use, and there is none", file=sys.stderr)
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
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        large = Training(device, 512, 6, 16)
        rows = agreement(large, folder) + command(folder)
        rows += overhead(Training(device, 64, 2, 4), "small", folder, 40)
        rows += overhead(Training(device, 1024, 24, 32), "large", folder, 3)
    print(
        f"{name}; {', '.join(versions)}\n\n| what | figure | asked for | holds |\n|---|---|---|---|"
    )
    for what, figure, asked, holds in rows:
        print(
            f"| {what} | {figure} | {asked} | {'' if holds is None else 'yes' if holds else 'NO'} |"
        )
    return 1 if any(row[3] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

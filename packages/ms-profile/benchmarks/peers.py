"""Compare our operator report with other readers, read a 2 GB trace, and measure the recorder.

Every reading runs in a fresh process, so that peak memory belongs to that reader; readers
alternate. `--peer-python` is an interpreter of an environment with the peers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from analysis import LARGE
from replicate import replicate

PARTS = ("readers", "large", "recorders")
SAMPLE = Path(__file__).parents[1] / "tests" / "traces" / "ddp" / "rank-00000.json.gz"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
MEASURE = """
import json, re, sys, time
{imports}
path = sys.argv[1]
peak_kib = lambda: int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak_kib()
started, clock = time.process_time(), time.perf_counter()
{work}
used, wall = time.process_time() - started, time.perf_counter() - clock
peak = peak_kib()
print(json.dumps({{"cpu_s": used, "wall_s": wall, "extra_bytes": (peak - before) * 1024,
                   "rows": rows}}))
"""
OURS = (
    "from ms_profile import operator_table, read_trace",
    "rows = len(operator_table(read_trace(path), by_shape=True))",
)
RECORD = """
import os, sys
import torch
from torch import nn
path, size = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
model = nn.TransformerEncoder(layer, 4)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
def record(steps):
    with torch.profiler.profile(record_shapes=True) as profiler:
        for _ in range(steps):
            model(torch.randn(4, 32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(path)
    return os.path.getsize(path)
record(20)
record(max(20, int(20 * size / record(20))))
"""
PEERS = {
    "HolisticTraceAnalysis, load": (
        "import logging, os\nlogging.disable(logging.CRITICAL)\n"
        "from hta.common.trace import parse_trace_file",
        "rows = len(parse_trace_file(path)[1])",
    ),
    "json.load": ("", "rows = len(json.load(open(path))['traceEvents'])"),
    "orjson.loads": (
        "import orjson",
        "rows = len(orjson.loads(open(path, 'rb').read())['traceEvents'])",
    ),
}


def measure(python: str, imports: str, work: str, path: Path) -> dict[str, float] | None:
    code = MEASURE.format(imports=imports, work=work)
    process = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True)
    if process.returncode:
        print(f"  failed: {process.stderr.strip().splitlines()[-1:]}")
        return None
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def record_trace(path: Path, size_mb: int) -> Path:
    """Record a real trace of about this size from training a small transformer.

    Copies of a small trace would not do: HolisticTraceAnalysis takes ten times longer for them.
    """
    subprocess.run([sys.executable, "-c", RECORD, str(path), str(size_mb * 1_000_000)], check=True)
    return path


def compare_readers(options: argparse.Namespace) -> list[str]:
    """Return table rows of every reader of one trace, in separate, alternating processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or record_trace(Path(folder) / "rank-0.json", options.size_mb)
        size = path.stat().st_size
        readers = {"ms-profile, full operator report": (sys.executable, *OURS)}
        readers |= {name: (options.peer_python, *code) for name, code in PEERS.items()}
        results: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, (python, imports, work) in readers.items():
                if (result := measure(python, imports, work, path)) is not None:
                    results[name].append(result)
    trace = f"{size / 1e6:.0f} MB trace"
    rows = []
    rate = {}
    for name, runs in results.items():
        if not runs:
            rows.append(f"| {trace}: {name} | failed | |")
            continue
        rates = [size / 1e6 / run["cpu_s"] for run in runs]
        rate[name] = statistics.median(rates)
        extra = statistics.median(run["extra_bytes"] for run in runs) / size
        target = "150 MB per CPU s; 0.5 x" if name.startswith("ms-profile") else ""
        rows.append(
            f"| {trace}: {name} | {rate[name]:.1f} MB per CPU s ({min(rates):.1f} to "
            f"{max(rates):.1f}), {extra:.2f} x the file in memory | {target} |"
        )
    hta = rate.get("HolisticTraceAnalysis, load")
    if hta is not None:
        speedup = rate["ms-profile, full operator report"] / hta
        rows.append(
            f"| ms-profile's report over HolisticTraceAnalysis's load | {speedup:.1f} x | 15 x |"
        )
    return rows


def large_trace(size_mb: int) -> str:
    """Return a table row for the report of a 2 GB trace, with the process's total memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json"
        replicate(SAMPLE, path, size_mb * 1_000_000)
        process = subprocess.run(
            [sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=True
        )
    return f"| operator report of a large trace | {process.stdout.strip()} | 1 GB |"


def recorders(rounds: int) -> list[str]:
    """Return table rows of the recorder and torch.profiler, on a small and a large step."""
    capture = Path(__file__).with_name("capture.py")
    command = [sys.executable, str(capture), "--only-steps", "--rounds", str(rounds)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=ONE_THREAD)
    results = json.loads(process.stdout)

    def spread(values: list[float]) -> str:
        return f"{values[1]:+.1f}% [{values[0]:.1f}, {values[2]:.1f}]"

    rows = []
    for size in ("small_step", "large_step"):
        step = results[size]
        label = (
            f"{size.replace('_', ' ')} of {step['step_ms']:.3g} ms, {step['spans_a_step']} spans"
        )
        own_cost = f"{step['recorder_own_us']:.0f} µs own cost, {step['recorder_own_percent']:.3f}%"
        rows += [
            f"| {label}: recorder | {spread(step['recorder_percent'])}; {own_cost} | "
            f"{'0.1%' if size == 'large_step' else ''} |",
            f"| {label}: torch.profiler, in the step "
            f"| {spread(step['torch_profiler_percent'])} | |",
            f"| {label}: torch.profiler, stop and export too | "
            f"{spread(step['torch_profiler_with_export_percent'])} | |",
            f"| {label}: the plain steps among themselves | {spread(step['plain_percent'])} | |",
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=257)
    parser.add_argument("--large-mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-rounds", type=int, default=8)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--trace", type=Path, help="read this trace instead of recording one")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts to run")
    options = parser.parse_args()
    selected = options.parts.split(",")
    if unknown := sorted(set(selected) - set(PARTS)):
        parser.error(f"--parts has {', '.join(unknown)}; use {', '.join(PARTS)}")
    rows = compare_readers(options) if "readers" in selected else []
    if "large" in selected:
        rows.append(large_trace(options.large_mb))
    if "recorders" in selected:
        rows += recorders(options.step_rounds)
    print("\n".join(["| what | figure: median, range or quartiles | target |", "|---|---|---|"]))
    print("\n".join(rows))


if __name__ == "__main__":
    main()

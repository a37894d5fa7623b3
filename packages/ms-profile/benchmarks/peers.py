"""One table: our operator report beside other readers, a 2 GB trace, the recorder's overhead.

Every reading is a process of its own, so that peak memory is that reader's; the readers alternate.
`--peer-python` names an interpreter that has the peers, where they live in another environment.
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
    done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True)
    if done.returncode:
        print(f"  failed: {done.stderr.strip().splitlines()[-1:]}")
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def recorded(path: Path, size_mb: int) -> Path:
    """A real trace of about this size: a small transformer's training under torch.profiler.

    Copies of a small one would not do: HolisticTraceAnalysis takes ten times as long for them.
    """
    subprocess.run([sys.executable, "-c", RECORD, str(path), str(size_mb * 1_000_000)], check=True)
    return path


def readers_beside_each_other(options: argparse.Namespace) -> list[str]:
    """Rows of the table: every reader of one trace, a process a reading, alternating."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.trace or recorded(Path(folder) / "rank-0.json", options.size_mb)
        size = path.stat().st_size
        readers = {"ms-profile, full operator report": (sys.executable, *OURS)}
        readers |= {name: (options.peer_python, *code) for name, code in PEERS.items()}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, (python, imports, work) in readers.items():
                if (one := measure(python, imports, work, path)) is not None:
                    found[name].append(one)
    trace = f"{size / 1e6:.0f} MB trace"
    rows = []
    rate = {}
    for name, runs in found.items():
        if not runs:
            rows.append(f"| {trace}: {name} | failed | |")
            continue
        rates = [size / 1e6 / run["cpu_s"] for run in runs]
        rate[name] = statistics.median(rates)
        extra = statistics.median(run["extra_bytes"] for run in runs) / size
        asked = "150 MB a CPU s; 0.5 x" if name.startswith("ms-profile") else ""
        rows.append(
            f"| {trace}: {name} | {rate[name]:.1f} MB a CPU s ({min(rates):.1f} to "
            f"{max(rates):.1f}), {extra:.2f} x the file in memory | {asked} |"
        )
    hta = rate.get("HolisticTraceAnalysis, load")
    if hta is not None:
        times = rate["ms-profile, full operator report"] / hta
        rows.append(
            f"| ms-profile's report over HolisticTraceAnalysis's load | {times:.1f} x | 15 x |"
        )
    return rows


def large_trace(size_mb: int) -> str:
    """A row: the report of a trace of 2 GB, and what memory the process took in all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json"
        replicate(SAMPLE, path, size_mb * 1_000_000)
        done = subprocess.run(
            [sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=True
        )
    return f"| operator report of a large trace | {done.stdout.strip()} | 1 GB |"


def recorders(rounds: int) -> list[str]:
    """Rows: the recorder beside torch.profiler, on a small and a large step, alternating."""
    capture = Path(__file__).with_name("capture.py")
    command = [sys.executable, str(capture), "--only-steps", "--rounds", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ONE_THREAD)
    found = json.loads(done.stdout)

    def spread(values: list[float]) -> str:
        return f"{values[1]:+.1f}% [{values[0]:.1f}, {values[2]:.1f}]"

    rows = []
    for kind in ("small_step", "large_step"):
        step = found[kind]
        what = f"{kind.replace('_', ' ')} of {step['step_ms']:.3g} ms, {step['spans_a_step']} spans"
        own = f"{step['recorder_own_us']:.0f} µs of its own, {step['recorder_own_percent']:.3f}%"
        rows += [
            f"| {what}: recorder | {spread(step['recorder_percent'])}; {own} | "
            f"{'0.1%' if kind == 'large_step' else ''} |",
            f"| {what}: torch.profiler, in the step | {spread(step['torch_profiler_percent'])} | |",
            f"| {what}: torch.profiler, stop and export too | "
            f"{spread(step['torch_profiler_with_export_percent'])} | |",
            f"| {what}: the plain steps among themselves | {spread(step['plain_percent'])} | |",
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=257)
    parser.add_argument("--large-mb", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-rounds", type=int, default=8)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--trace", type=Path, help="read this one, not one recorded for it")
    parser.add_argument("--parts", default=",".join(PARTS), help="of these, those to measure")
    options = parser.parse_args()
    asked = options.parts.split(",")
    if unknown := sorted(set(asked) - set(PARTS)):
        parser.error(f"--parts has {', '.join(unknown)}; give some of {', '.join(PARTS)}")
    rows = readers_beside_each_other(options) if "readers" in asked else []
    if "large" in asked:
        rows.append(large_trace(options.large_mb))
    if "recorders" in asked:
        rows += recorders(options.step_rounds)
    print("\n".join(["| what | figure: median, range or quartiles | asked for |", "|---|---|---|"]))
    print("\n".join(rows))


if __name__ == "__main__":
    main()

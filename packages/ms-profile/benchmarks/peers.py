"""Our full operator report beside other readers of the same trace: MB a CPU second, and memory.

Every reading is a process of its own, so that peak memory is that reader's; the readers alternate.
`--peer-python` names an interpreter that has the peers, where they live in another environment.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from replicate import replicate

SAMPLE = Path(__file__).parents[1] / "tests" / "traces" / "ddp" / "rank-00000.json.gz"
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
    "from ms_profile.operators import operator_table\nfrom ms_profile.trace import read_trace",
    "rows = len(operator_table(read_trace(path), by_shape=True))",
)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=257)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="the real trace to replicate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json"
        copies = replicate(options.trace, path, options.size_mb * 1_000_000)
        size = path.stat().st_size
        print(f"{size / 1e6:.0f} MB, {copies} copies of {options.trace.name}")
        readers = {"ms-profile, full operator report": (sys.executable, *OURS)}
        readers |= {name: (options.peer_python, *code) for name, code in PEERS.items()}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
        for _ in range(options.rounds):
            for name, (python, imports, work) in readers.items():
                if (one := measure(python, imports, work, path)) is not None:
                    found[name].append(one)
        for name, runs in found.items():
            if runs:
                cpu = statistics.median(run["cpu_s"] for run in runs)
                extra = statistics.median(run["extra_bytes"] for run in runs)
                print(
                    f"{name:34} {size / 1e6 / cpu:7.1f} MB/CPU s  {cpu:6.2f} s  "
                    f"extra memory {extra / size:5.2f} x file  {runs[0]['rows']} rows"
                )


if __name__ == "__main__":
    main()

"""Benchmarks of the analysis: a 2 GB trace, faults, equal runs, the page in a browser."""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from browser import open_browser
from replicate import replicate

from ms_profile import Analysis, analyse, analyse_traces, compare, diagnose, write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simulation import Fault, simulate_run

TRACES = Path(__file__).parents[1] / "tests" / "traces" / "ddp"
LARGE = """
import re, sys, time
from ms_profile import operator_table, read_trace
started = time.process_time()
trace = read_trace(sys.argv[1])
rows = operator_table(trace, by_shape=True)
used = time.process_time() - started
peak = int(re.search("VmHWM:\\\\s+(\\\\d+)", open("/proc/self/status").read())[1]) / 1024
print(f"{trace.file_bytes / 1e9:.2f} GB, {len(trace)} spans: {trace.file_bytes / 1e6 / used:.0f} "
      f"MB/CPU s, peak {peak:.0f} MiB in all")
"""
FRAMES = """
const line = window.timeline, stamps = [], paints = [];
line.show(0, line.length);
function frame(now) {
  stamps.push(now);
  const n = stamps.length % 180, begun = performance.now();
  if (n < 60) line.pan(0.01); else line.zoom(n < 120 ? 0.93 : 1 / 0.93, 700);
  line.paint();
  paints.push(performance.now() - begun);
  if (stamps.length < 360) { requestAnimationFrame(frame); return; }
  paints.sort((a, b) => a - b);
  done({ rate: 359000 / (stamps[359] - stamps[0]), median: paints[180], p95: paints[342] });
}
requestAnimationFrame(frame);
"""
OPENED = """
const wait = () => window.timeline
  ? requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now())))
  : setTimeout(wait, 5);
wait();
"""


def large(size_mb: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.json"
        replicate(TRACES / "rank-00000.json.gz", path, size_mb * 1_000_000)
        subprocess.run([sys.executable, "-c", LARGE, str(path)], check=True)


def faults(cases: int) -> None:
    """Diagnose faults with clocks 3 s and 50 ppm apart, 2 to 8 ranks, and delays of 5 ms to 1 s."""
    random = np.random.default_rng(1)
    correct, total, errors = 0, 0, []
    for case in range(cases):
        phase: Any = ("data", "compute", "garbage", "host", "link")[case % 5]
        ranks = int(random.choice([2, 4, 8]))
        every_nth = 3 if phase == "link" and ranks == 2 else int(random.choice([1, 1, 3]))
        rank = int(random.integers(ranks))
        delay = int(10 ** random.uniform(np.log10(5e6), 9))
        offsets, drifts = random.uniform(-3e9, 3e9, ranks), random.uniform(-5e-5, 5e-5, ranks)
        offsets[0] = drifts[0] = 0.0
        run = simulate_run(
            ranks=ranks, grid=2 if ranks > 2 else 0, offsets_ns=list(offsets), drifts=list(drifts),
            fault=Fault(phase=phase, rank=rank, delay_ns=delay, every=every_nth), seed=case,
        )  # fmt: skip
        analysis = analyse_traces(run.traces, garbage=run.garbage)
        verdict = diagnose(analysis.ledger)
        total += 1
        correct += verdict is not None and verdict.phase == phase and rank in verdict.ranks
        errors.append(clock_errors(analysis, run.origin_ns, run.offsets_ns, run.drifts))
    spread = np.percentile(np.concatenate(errors), [50, 99]) / 1e3
    print(f"injected faults: rank and phase correct in {correct} of {total}")
    print(f"clocks: median error {spread[0]:.1f} µs, {spread[1]:.1f} µs at p99")


def clock_errors(
    analysis: Analysis, origin_ns: int, offsets: tuple[float, ...], drifts: tuple[float, ...]
) -> np.ndarray:
    errors = []
    for rank, rank_analysis in analysis.ranks.items():
        local_ns = rank_analysis.trace.start_ns - origin_ns
        true_ns = (local_ns - offsets[rank]) / (1 + drifts[rank]) + origin_ns
        if rank_analysis.clock is not None:
            errors.append(
                np.abs(rank_analysis.clock.correct(rank_analysis.trace.start_ns) - true_ns)
            )
    return np.concatenate(errors)


def equal_runs(pairs: int) -> None:
    regressions = 0
    for pair in range(pairs):
        runs = [
            analyse_traces(simulate_run(ranks=2, steps=16, noise=0.1, seed=2 * pair + n).traces)
            for n in (0, 1)
        ]
        regressions += compare(*runs).regression
    print(f"equal runs reported as regressions: {regressions} of {pairs}")


def page(size_mb: int) -> None:
    if not shutil.which("chromedriver"):
        print("report in a browser: skipped, needs Debian's chromium and chromium-driver")
        return
    with tempfile.TemporaryDirectory() as folder:
        for rank in (0, 1):
            source, target = TRACES / f"rank-0000{rank}.json.gz", Path(folder) / f"rank-{rank}.json"
            replicate(source, target, size_mb * 1_000_000, seed=rank)
        analysis = analyse(folder)
        report = Path(folder) / "report.html"
        start = time.process_time()
        write_report(analysis, report)
        cpu_s = time.process_time() - start
        spans = sum(len(rank_analysis.trace) for rank_analysis in analysis.ranks.values())
        size_mb = report.stat().st_size / 1e6
        print(f"report: {spans} spans, {size_mb:.2f} MB, written in {cpu_s:.1f} s")
        with open_browser() as browser:
            opened = []
            for _ in range(5):
                browser.visit("about:blank")
                browser.visit(f"file://{report}#timeline")
                opened.append(browser.run(OPENED))
            print(f"opens, timeline drawn, in {statistics.median(opened) / 1e3:.2f} s "
                  f"({min(opened) / 1e3:.2f} to {max(opened) / 1e3:.2f})")  # fmt: skip
            frames = browser.run(FRAMES)
            print(f"pan and zoom: {frames['rate']:.0f} frames/s; a frame takes "
                  f"{frames['median']:.1f} ms, at p95 {frames['p95']:.1f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-mb", type=int, default=2000, help="size of the large trace")
    parser.add_argument("--cases", type=int, default=200, help="number of injected faults")
    parser.add_argument("--page-mb", type=int, default=300, help="size of each rank's trace")
    options = parser.parse_args()
    large(options.size_mb)
    faults(options.cases)
    equal_runs(options.cases)
    page(options.page_mb)


if __name__ == "__main__":
    main()

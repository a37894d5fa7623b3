"""Test of the installed wheel without torch and the sibling packages; run with `python -I`."""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `-I` drops the script's folder
from simulation import Fault, simulate_run

import ms_profile


def check(holds: bool, fact: str) -> None:
    """Exit with code 1 unless the fact holds."""
    if not holds:
        sys.exit(f"ms-profile alone: {fact} does not hold")


def main() -> None:
    """Write and read events and spans, align clocks, fit a link, and run the commands."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(2):
            with ms_profile.EventLog(folder / "events", rank=rank, world_size=2) as log:
                for step in range(3):
                    log("step", {"step": step, "loss": 1.0 / (step + 1)})
        events = list(ms_profile.read_events(folder))
        check(len(events) == 6, "six events are read back")
        check(ms_profile.StepMetrics.of(events[-1]).loss == 1 / 3, "the last loss is 1/3")
        check(ms_profile.export_tensorboard(events, folder / "tb") == 6, "six scalars")
        with ms_profile.Recorder(folder / "r.ring") as recorder:
            check(list(recorder.batches([1, 2])) == [1, 2], "batches pass through")
        check(len(ms_profile.read_ring(folder / "r.ring").spans) == 3, "three waits are recorded")
        command = [sys.executable, "-I", "-m", "ms_profile", "logs", str(folder), "--json"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        check(len(printed.splitlines()) == 6, "the command prints six lines")
    ends = {rank: {number: number * 10**6 + 500 * rank for number in range(9)} for rank in range(2)}
    fits = ms_profile.align_clocks(ends)
    check(abs(fits[1].offset_ns - 500) < 1, "the offset of 500 ns is found")
    fit = ms_profile.fit_link([0, 10**6], [1e-5, 1e-5 + 1e-3])
    check(abs((fit.bandwidth_bytes_per_s or 0) / 1e9 - 1) < 1e-6, "1 GB/s is found")
    slow = Fault(phase="data", rank=1, delay_ns=20_000_000)
    run = ms_profile.analyse_traces(simulate_run(ranks=2, fault=slow).traces)
    verdict = ms_profile.diagnose(run.ledger)
    rank_and_phase = None if verdict is None else (verdict.ranks, verdict.phase)
    check(rank_and_phase == ((1,), "data"), "the slow rank and phase are named")
    with tempfile.TemporaryDirectory() as name:
        ms_profile.write_report(run, Path(name) / "report.html")
        text = (Path(name) / "report.html").read_text()
        check(
            "DecompressionStream" in text and "Where the time goes" in text, "the page is complete"
        )
    command = [sys.executable, "-I", "-m", "ms_profile", "doctor"]
    doctor = subprocess.run(command, capture_output=True, text=True)
    check("ms-profile[torch]" in doctor.stderr, "doctor names the extra that it needs")
    check("torch" not in sys.modules, "torch is not imported")


if __name__ == "__main__":
    main()

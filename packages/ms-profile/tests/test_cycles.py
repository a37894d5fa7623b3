"""Several files of one process are cycles of a profiler, not ranks."""

import json
from pathlib import Path

import pytest

from ms_profile.analysis.whole_run import analyse


def write_cycle(path: Path, pid: int, start_us: float, **fields: object) -> None:
    """Write a three-step trace of a process without a rank."""
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": pid,
         "ts": start_us + 100 * step, "dur": 80.0}
        for step in range(3)
        for category, name in (("user_annotation", f"ProfilerStep#{step}"), ("cpu_op", "aten::mm"))
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, **fields}))


def test_two_cycles_of_a_tensorboard_handler_are_one_rank(tmp_path: Path) -> None:
    """With `repeat=2` the later cycle is analyzed, and the report names the ignored one."""
    for time, start_us in ((1727743122000000000, 0.0), (1727743123000000000, 5000.0)):
        write_cycle(tmp_path / f"host_77.{time}.pt.trace.json", 77, start_us)
    run = analyse(tmp_path)
    assert list(run.ranks) == [0]
    assert int(run.ranks[0].trace.start_ns[0]) == 5_000_000
    (warning,) = run.warnings
    assert "host_77.1727743122000000000.pt.trace.json" in warning
    assert "is ignored" in warning


def test_processes_that_record_at_the_same_time_are_ranks(tmp_path: Path) -> None:
    """Also if all have the same worker name and two cycles each."""
    for number, pid in enumerate((77, 78)):
        for cycle, start_us in enumerate((0.0, 5000.0)):
            time = 1727743122000000000 + cycle * 10**9 + number
            write_cycle(tmp_path / f"run.{time}.pt.trace.json", pid, start_us + number)
    run = analyse(tmp_path)
    assert list(run.ranks) == [0, 1]
    assert {int(rank_analysis.trace.start_ns[0]) for rank_analysis in run.ranks.values()} == {
        5_000_000,
        5_001_000,
    }


@pytest.mark.parametrize("suffix", [".json", ".JSON", ".pt.trace.json", ".Pt.Trace.Json"])
def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path, suffix: str) -> None:
    """Suffixes are compared in lower case."""
    write_cycle(tmp_path / f"rank3{suffix}", 1, 0.0)
    assert list(analyse(tmp_path).ranks) == [3]

"""Parts of capture: metrics, schedules, import hooks, and running a script like Python."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ms_profile.errors import CaptureError, MetricError
from ms_profile.log.manifest import TraceSchedule
from ms_profile.metrics import METRICS, Collect, collected_for, parse_metrics
from ms_profile.recording.plan import ProcessRank, clear_run
from ms_profile.recording.trace_schedule import StepAction, action_at, check_schedule

WINDOWS = st.builds(
    TraceSchedule,
    skip=st.integers(0, 5),
    warmup=st.integers(0, 3),
    active=st.integers(1, 5),
    windows=st.integers(0, 4),
    every=st.integers(8, 20),
)


def test_metrics_are_sorted_and_unique() -> None:
    """In the order of METRICS, whatever the order of the input."""
    assert parse_metrics("memory, communication_time,memory") == ("communication_time", "memory")
    assert parse_metrics(",".join(METRICS)) == tuple(METRICS)


@pytest.mark.parametrize(
    ("unknown", "suggestion"),
    [("comunication_time", "communication_time"), ("memry", "memory"), ("data", "data_time")],
)
def test_an_unknown_metric_names_the_nearest(unknown: str, suggestion: str) -> None:
    """One line with the unknown name and a suggestion."""
    with pytest.raises(
        MetricError, match=f"unknown metric '{unknown}'; did you mean '{suggestion}'"
    ):
        parse_metrics(unknown)


def test_a_metric_without_a_near_match_lists_all() -> None:
    """An empty list of metrics is an error too."""
    with pytest.raises(MetricError, match="the metrics are communication_time"):
        parse_metrics("zzzzqqq")
    with pytest.raises(MetricError, match="must name at least one metric"):
        parse_metrics(" , ")


def test_only_the_required_data_is_recorded() -> None:
    """Shapes and allocations are slow to record, so they need a metric that uses them."""
    assert collected_for(["compute_time", "idle"]) == Collect.NOTHING
    assert collected_for(["memory"]) == Collect.MEMORY
    assert Collect.SHAPES in collected_for(["communication_time"])


@given(WINDOWS)
def test_each_window_records_its_steps_and_is_saved_once(window: TraceSchedule) -> None:
    """Every window has `warmup` steps, then `active` recorded ones, and is saved at the last."""
    phases = [action_at(check_schedule(window), step) for step in range(200)]
    starts = [step for step in range(199) if phases[step] is not StepAction.NONE]
    assert phases[: window.skip] == [StepAction.NONE] * window.skip
    number = 0
    step = window.skip
    while step + window.every < 200 and (not window.windows or number < window.windows):
        expected = [StepAction.WARMUP] * window.warmup + [StepAction.RECORD] * (window.active - 1)
        assert phases[step : step + len(expected) + 1] == [*expected, StepAction.RECORD_AND_SAVE]
        number, step = number + 1, step + window.every
    if window.windows:
        assert len(starts) == min(window.windows, 99) * (window.warmup + window.active)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (TraceSchedule(skip=-1), "skip must be at least 0, got -1"),
        (TraceSchedule(active=0), "active must be at least 1"),
        (TraceSchedule(every=3), "every must be at least 9"),
    ],
)
def test_an_invalid_schedule_is_refused(window: TraceSchedule, message: str) -> None:
    """The message has the setting and its value."""
    with pytest.raises(CaptureError, match=message):
        check_schedule(window)


def test_the_rank_is_read_from_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """From torchrun's variables, then Open MPI's and Slurm's; otherwise a single process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert ProcessRank.from_environment() == ProcessRank()
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert ProcessRank.from_environment() == ProcessRank(rank=3, world_size=8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ProcessRank.from_environment() == ProcessRank(rank=1, local_rank=1, world_size=2)


def test_overwriting_removes_only_a_runs_files(tmp_path: Path) -> None:
    """A folder without a run is not cleared, and other files stay."""
    (tmp_path / "precious").write_text("x")
    with pytest.raises(CaptureError, match="has files but no run"):
        clear_run(tmp_path, ProcessRank())
    (tmp_path / "manifest.json").write_text("{}")
    for rank in range(3):
        (tmp_path / "ring").mkdir(exist_ok=True)
        (tmp_path / f"ring/rank-{rank:05d}.ring").write_text("x")
    clear_run(tmp_path, ProcessRank(rank=0, world_size=2))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "precious",
        "rank-00001.ring",
    }


IMPORTS = """
import sys
from ms_profile.recording.import_hook import when_imported
seen = []
when_imported("colorsys", lambda: seen.append(sys.modules["colorsys"].ONE_THIRD * 3))
assert seen == [] and "colorsys" not in sys.modules
import importlib.util
assert importlib.util.find_spec("colorsys") is not None  # as libraries search for torch
assert seen == [] and "colorsys" not in sys.modules
import json.scanner, colorsys
assert seen == [1.0], seen
assert type(colorsys.__spec__.loader).__module__ != "ms_profile.recording.import_hook"
assert all("ms_profile" not in type(finder).__module__ for finder in sys.meta_path)
when_imported("colorsys", lambda: seen.append(2))
assert seen[1] == 2
"""


def test_the_import_hook_runs_after_the_import_and_removes_itself() -> None:
    """The callback sees the complete module; the import system is restored."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


SCRIPTS = {
    "raises": "def f():\n    raise ValueError('bad ' * 3)\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "exits": "import sys; sys.exit(9)",
    "exits with words": "import sys; sys.exit('words')",
    "exits well": "raise SystemExit",
    "syntax": "x = = 1",
    "ends": "import __main__, sys; print(__name__, __file__, sys.argv, sys.path[0], __main__.sys)",
    "pickles": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_under_python_itself(tmp_path: Path, name: str) -> None:
    """Identical stdout, stderr and exit code."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    code = (
        "import sys; from pathlib import Path; from ms_profile.recording.script import run_script;"
        "sys.exit(run_script(Path('script.py'), ['a', '-b']).exit_code)"
    )
    ours_command = [sys.executable, "-c", code]
    python_command = [sys.executable, "script.py", "a", "-b"]
    actual, expected = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        for command in (ours_command, python_command)
    )
    assert actual.stderr == expected.stderr
    assert (actual.returncode, actual.stdout) == (expected.returncode, expected.stdout)


SAVING = """
import os, signal, sys, time
from ms_profile.recording.script import Termination
def save():
    print("saved", flush=True)
termination = Termination(save)
with termination.saving():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    print("finished", flush=True)
print("alive", flush=True)
"""


def test_termination_waits_for_saving() -> None:
    """A SIGTERM during saving ends the process afterwards, without saving twice."""
    process = subprocess.run([sys.executable, "-c", SAVING], capture_output=True, text=True)
    assert process.stdout == "finished\n"
    assert process.returncode == -signal.SIGTERM


def test_the_wait_for_a_cpu_is_counted_by_thread(tmp_path: Path) -> None:
    """Two processes share a CPU: each waits about as long as it runs; the first reading is None."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    if process.stdout.strip() == "not counted":
        pytest.skip("this kernel does not count waits")
    waited_s, ran_s, elapsed_s = map(float, process.stdout.split())
    assert 0.2 * ran_s < waited_s < elapsed_s - ran_s + CLOCK_ERROR_S


CLOCK_ERROR_S = 0.05
"""The kernel counts waits and CPU times by different clocks."""


BUSY = """
import multiprocessing
import os
import time
from ms_profile.recording.cpu_wait import CpuWait

def spin(started):
    started.set()
    while True:
        pass

if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    context = multiprocessing.get_context("fork")
    started = context.Event()
    other = context.Process(target=spin, args=(started,), daemon=True)
    other.start()
    started.wait()
    wait = CpuWait()
    start, ran = time.monotonic(), time.thread_time()
    assert wait.since_last_ns() is None
    while time.thread_time() - ran < 0.5:
        pass
    waited = wait.since_last_ns()
    ran, elapsed = time.thread_time() - ran, time.monotonic() - start
    print("not counted" if waited is None else f"{waited / 1e9} {ran} {elapsed}")
    wait.close()
    other.kill()
"""


def test_a_truncated_trace_is_not_complete(tmp_path: Path) -> None:
    """Also after the closing brace of an event, of its arguments, or of a nested list."""
    from torch.profiler import profile, record_function

    from ms_profile.recording.tracer import _is_complete

    path = tmp_path / "trace.json"
    with profile(record_shapes=True) as traced, record_function("closes ] } here"):
        torch.ones(3).reshape(3, 1) + 1
    traced.add_metadata_json("groups", '{"a": {"b": [1]}}')
    traced.export_chrome_trace(str(path))
    content = path.read_bytes()
    assert _is_complete(path)
    cuts = [position for position, byte in enumerate(content[:-1], 1) if byte in b'}]"']
    assert len(cuts) > 200
    for position in cuts:
        path.write_bytes(content[:position])
        assert not _is_complete(path), content[position - 80 : position]

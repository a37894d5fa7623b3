"""The pure parts of capture: metrics, phases, imports, and running a script as Python would."""

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


def test_metrics_come_in_their_own_order() -> None:
    """However they are given, once each."""
    assert parse_metrics("memory, communication_time,memory") == ("communication_time", "memory")
    assert parse_metrics(",".join(METRICS)) == tuple(METRICS)


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [("comunication_time", "communication_time"), ("memry", "memory"), ("data", "data_time")],
)
def test_an_unknown_metric_names_the_nearest(given_name: str, meant: str) -> None:
    """One line with the offender and the remedy."""
    with pytest.raises(MetricError, match=f"unknown metric '{given_name}'; did you mean '{meant}'"):
        parse_metrics(given_name)


def test_a_far_fetched_metric_lists_all_and_none_is_an_error() -> None:
    """Where nothing is near, the known ones are listed."""
    with pytest.raises(MetricError, match="the metrics are communication_time"):
        parse_metrics("zzzzqqq")
    with pytest.raises(MetricError, match="must name at least one metric"):
        parse_metrics(" , ")


def test_only_what_is_asked_for_is_recorded() -> None:
    """Shapes and allocations cost time, and are left out unless a metric needs them."""
    assert collected_for(["compute_time", "idle"]) == Collect.NOTHING
    assert collected_for(["memory"]) == Collect.MEMORY
    assert Collect.SHAPES in collected_for(["communication_time"])


@given(WINDOWS)
def test_each_window_records_its_steps_and_is_saved_once(window: TraceSchedule) -> None:
    """Every window is `warmup` warm steps, then `active` recorded ones of which the last saves."""
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
def test_a_window_that_makes_no_sense_is_refused(window: TraceSchedule, message: str) -> None:
    """The message names the number."""
    with pytest.raises(CaptureError, match=message):
        check_schedule(window)


def test_the_place_is_read_from_the_launchers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's variables come first, then Open MPI's and Slurm's; alone otherwise."""
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


def test_overwriting_removes_a_runs_files_and_nothing_else(tmp_path: Path) -> None:
    """A folder that holds no run is not cleared, and foreign files stay."""
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


def test_an_import_is_noticed_once_it_is_complete_and_leaves_no_trace() -> None:
    """The callback finds the module ready; the import system is as before."""
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
    """Same stdout, same stderr to the letter, same exit code."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name])
    code = (
        "import sys; from pathlib import Path; from ms_profile.recording.script import run_script;"
        "sys.exit(run_script(Path('script.py'), ['a', '-b']).exit_code)"
    )
    ours = [sys.executable, "-c", code]
    plain = [sys.executable, "script.py", "a", "-b"]
    got, wanted = (
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        for command in (ours, plain)
    )
    assert got.stderr == wanted.stderr
    assert (got.returncode, got.stdout) == (wanted.returncode, wanted.stdout)


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


def test_a_termination_waits_for_what_is_being_saved() -> None:
    """A SIGTERM in the middle of saving ends the process after it, and saves no second time."""
    done = subprocess.run([sys.executable, "-c", SAVING], capture_output=True, text=True)
    assert done.stdout == "finished\n"
    assert done.returncode == -signal.SIGTERM


def test_the_wait_for_a_cpu_is_counted_by_thread(tmp_path: Path) -> None:
    """Two threads of work on one CPU wait about half the time; a thread's first answer is None."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "not counted":
        pytest.skip("this kernel counts no waits")
    waited_share = float(done.stdout)
    assert 0.2 < waited_share < 0.9


BUSY = """
import multiprocessing
import os
import time
from ms_profile.recording.cpu_wait import CpuWait

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    wait = CpuWait()
    assert wait.since_last_ns() is None
    other = multiprocessing.get_context("fork").Process(target=spin, args=(1.5,))
    other.start()
    spin(1.0)
    waited = wait.since_last_ns()
    print("not counted" if waited is None else waited / 1e9)
    wait.close()
    other.join()
"""


def test_a_trace_that_is_cut_off_anywhere_is_not_complete(tmp_path: Path) -> None:
    """Also behind the closing brace of an event, of its arguments, or of a nested list."""
    from torch.profiler import profile, record_function

    from ms_profile.recording.tracer import _is_complete

    path = tmp_path / "trace.json"
    with profile(record_shapes=True) as traced, record_function("closes ] } here"):
        torch.ones(3).reshape(3, 1) + 1
    traced.add_metadata_json("groups", '{"a": {"b": [1]}}')
    traced.export_chrome_trace(str(path))
    content = path.read_bytes()
    assert _is_complete(path)
    cuts = [at for at, byte in enumerate(content[:-1], 1) if byte in b'}]"']
    assert len(cuts) > 200
    for at in cuts:
        path.write_bytes(content[:at])
        assert not _is_complete(path), content[at - 80 : at]

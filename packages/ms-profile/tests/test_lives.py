"""Scripts that fork, exit or remove folders work under `ms-profile run` as without it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ms_profile.log.event_log import EventLog
from ms_profile.log.event_reader import EventFilter, read_events
from ms_profile.log.manifest import read_ranks
from ms_profile.log.ring import Kind, Ring, read_ring

pytest.importorskip("torch")
from processes import run_command

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
RUN = [sys.executable, "-m", "ms_profile", "run", "--active", "4", "--windows", "1"]
Finished = subprocess.CompletedProcess[str]


def run(folder: Path, script: Path, *options: str) -> Finished:
    """Run a script under ms-profile; a hanging one fails the test."""
    paths = ["--train-script", str(script), "--output-dir", str(folder)]
    command = [*RUN, *options, *paths, "--"]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=ENVIRONMENT)


def test_a_forking_script_and_its_children_work_as_without_profiling(tmp_path: Path) -> None:
    """Each forked child trains and exits with its own code; only the parent is recorded."""
    script = Path(__file__).with_name("forking_script.py")
    process = run(tmp_path / "out", script)
    assert (process.returncode, process.stdout) == (0, "inside 0\nbefore 3\nafter 0\n"), (
        process.stderr
    )
    assert process.stderr.count("ms-profile: ") == 1, "children must print nothing"
    (rank,) = read_ranks(tmp_path / "out")
    assert (rank.steps, rank.complete, rank.traces[0].steps) == (12, True, 4)
    steps = [event.step for event in read_events(tmp_path / "out", EventFilter(kinds={"step"}))]
    assert steps == list(range(12))
    ring = read_ring(tmp_path / "out/ring/rank-00000.ring")
    forwards = ring.spans[ring.spans["kind"] == Kind.FORWARD]
    # A model is detected at its optimizer's first step, after its first forward pass.
    assert len(forwards) == 11


def test_a_forked_childs_spans_do_not_reach_its_parents_ring(tmp_path: Path) -> None:
    """After `abandon` a ring accepts spans and discards them."""
    ring = Ring(tmp_path / "one.ring")
    span = ring.begin(ring.name("before"), Kind.OTHER)
    child = os.fork()
    if not child:
        ring.abandon()
        ring.end(span)
        ring.end(ring.begin(ring.name("in the child"), Kind.OTHER))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recording = read_ring(tmp_path / "one.ring")
    assert [(recording.name_of(row["name"]), int(row["end_ns"])) for row in recording.spans] == [
        ("before", 0)
    ]


REMOVES = """
import shutil, sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for step in range(12):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step == 10:
        shutil.rmtree(sys.argv[1])
"""


def test_removing_the_output_folder_during_the_run_fails_the_command(tmp_path: Path) -> None:
    """The script finishes; the missing files are named and the exit code is 1."""
    script = tmp_path / "removes.py"
    script.write_text(REMOVES)
    out = str(tmp_path / "out")
    command = [*RUN[1:], "--train-script", str(script), "--output-dir", out, "--", out]
    process = run_command(command, environment=ENVIRONMENT)
    assert process.returncode == 1
    assert "were removed while the script ran" in process.stderr
    assert "traces/rank-00000.000.json" in process.stderr
    assert "Traceback" not in process.stderr


def test_an_event_log_counts_events_lost_with_a_removed_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writing to a deleted file is not a success."""
    log = EventLog(tmp_path / "events", rank=0, flush_interval_s=100)
    log("a", {"n": 1})
    log.path.unlink()
    log.close()
    assert log.lost == 1
    assert "the log was removed" in caplog.text


def test_a_rank_that_exits_is_not_reported_as_killed(tmp_path: Path) -> None:
    """The launcher passes its exit code on, although torchrun returns 1."""
    script = tmp_path / "ends.py"
    script.write_text("import os\nos._exit(2)\n")
    process = run(tmp_path / "out", script, "--nproc-per-node", "1")
    assert process.returncode == 2
    assert "rank 0 exited with code 2 before it could report" in process.stderr
    assert "killed" not in process.stderr


def test_ctrl_c_gives_exit_code_130(tmp_path: Path) -> None:
    """A waiting command ends with one line, no traceback and the conventional exit code."""
    command = [sys.executable, "-m", "ms_profile", "logs", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "waiting for events" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        assert waiting.stderr.read() == "ms-profile: interrupted\n"


def test_json_output_is_a_single_document(tmp_path: Path) -> None:
    """The script's own output goes to stderr."""
    import json

    script = tmp_path / "prints.py"
    script.write_text("print('from the script')\n")
    process = run(tmp_path / "out", script, "--json")
    assert json.loads(process.stdout)[0]["exit_code"] == 0
    assert "from the script" in process.stderr

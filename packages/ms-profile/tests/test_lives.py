"""What a script does to its own processes and folders costs it nothing under `ms-profile run`."""

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


def run(folder: Path, script: Path, *own: str) -> Finished:
    """Run a script under ms-profile; one that never ends fails the test."""
    named = ["--train-script", str(script), "--output-dir", str(folder)]
    command = [*RUN, *own, *named, "--"]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=ENVIRONMENT)


def test_a_script_that_forks_ends_as_alone_and_its_children_too(tmp_path: Path) -> None:
    """Each forked child trains and exits with its own code; the parent alone is recorded."""
    script = Path(__file__).with_name("forking_script.py")
    done = run(tmp_path / "out", script)
    assert (done.returncode, done.stdout) == (0, "inside 0\nbefore 3\nafter 0\n"), done.stderr
    assert done.stderr.count("ms-profile: ") == 1, "a child that comes to its end says nothing"
    (rank,) = read_ranks(tmp_path / "out")
    assert (rank.steps, rank.complete, rank.traces[0].steps) == (12, True, 4)
    steps = [event.step for event in read_events(tmp_path / "out", EventFilter(kinds={"step"}))]
    assert steps == list(range(12))
    ring = read_ring(tmp_path / "out/ring/rank-00000.ring")
    forwards = ring.spans[ring.spans["kind"] == Kind.FORWARD]
    # A model is found when its optimizer steps for the first time, after its first forward.
    assert len(forwards) == 11


def test_a_forked_childs_spans_do_not_reach_its_parents_ring(tmp_path: Path) -> None:
    """After `abandon` a ring takes spans and writes them nowhere."""
    ring = Ring(tmp_path / "one.ring")
    span = ring.begin(ring.name("before"), Kind.OTHER)
    child = os.fork()
    if not child:
        ring.abandon()
        ring.end(span)
        ring.end(ring.begin(ring.name("in the child"), Kind.OTHER))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = read_ring(tmp_path / "one.ring")
    assert [(found.name_of(one["name"]), int(one["end_ns"])) for one in found.spans] == [
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


def test_an_output_folder_that_is_removed_on_the_way_fails_the_command(tmp_path: Path) -> None:
    """The script ends well; what is gone is named and the exit code is 1."""
    script = tmp_path / "removes.py"
    script.write_text(REMOVES)
    out = str(tmp_path / "out")
    words = [*RUN[1:], "--train-script", str(script), "--output-dir", out, "--", out]
    done = run_command(words, environment=ENVIRONMENT)
    assert done.returncode == 1
    assert "were removed while the script ran" in done.stderr
    assert "traces/rank-00000.000.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_event_log_whose_file_is_removed_counts_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writing into a file that nobody can open any more is no success."""
    log = EventLog(tmp_path / "events", rank=0, flush_interval_s=100)
    log("a", {"n": 1})
    log.path.unlink()
    log.close()
    assert log.lost == 1
    assert "the log was removed" in caplog.text


def test_a_rank_that_ends_itself_is_not_called_killed(tmp_path: Path) -> None:
    """An exit code is no signal, and the launcher passes it on, though torchrun says 1."""
    script = tmp_path / "ends.py"
    script.write_text("import os\nos._exit(2)\n")
    done = run(tmp_path / "out", script, "--nproc-per-node", "1")
    assert done.returncode == 2
    assert "rank 0 exited with code 2 before it could report" in done.stderr
    assert "killed" not in done.stderr


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    """A command that waits ends with one line, no traceback and the shell's own code for it."""
    command = [sys.executable, "-m", "ms_profile", "logs", str(tmp_path), "--follow"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "waiting for events" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        assert waiting.stderr.read() == "ms-profile: interrupted\n"


def test_with_json_stdout_is_one_document(tmp_path: Path) -> None:
    """What the script prints goes to stderr then."""
    import json

    script = tmp_path / "prints.py"
    script.write_text("print('from the script')\n")
    done = run(tmp_path / "out", script, "--json")
    assert json.loads(done.stdout)[0]["exit_code"] == 0
    assert "from the script" in done.stderr

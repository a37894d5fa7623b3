"""Trackers: what arrives at TensorBoard, W&B and MLflow, and that none holds up a training."""

import json
import logging
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_profile.errors import TrackerError
from ms_profile.log.json_lines import read_json_lines
from ms_profile.trackers import MLflow, Point, RunStart, TensorBoard, Tracker, Wandb
from ms_profile.trackers.destination import need_library
from ms_profile.trackers.events import point_of

BLOCK = 32768
"""Bytes of a block of W&B's file, which is LevelDB's log."""


class Remembering:
    """A destination in this process, which can be slow or refuse."""

    title = "Remembering"
    measures_system = False

    def __init__(self, *, refuses: bool = False, breaks: bool = False, hangs_s: float = 0) -> None:
        self.refuses, self.breaks, self.hangs_s = refuses, breaks, hangs_s
        self.starts: list[RunStart] = []
        self.points: list[Point] = []
        self.threads: set[str] = set()
        self.outcomes: list[str] = []

    def check(self) -> None:
        """Nothing is needed."""

    def open(self, start: RunStart, /) -> "Remembering":
        """Note the start."""
        if self.refuses:
            raise ConnectionError("nobody\nanswers")
        self.starts.append(start)
        return self

    def write(self, points: Sequence[Point], /) -> None:
        """Note the points."""
        time.sleep(self.hangs_s)
        if self.breaks:
            raise OSError("the server is full")
        self.threads.add(threading.current_thread().name)
        self.points += points

    def close(self, outcome: str, /) -> None:
        """Note the end."""
        self.outcomes.append(outcome)


def test_numbers_are_curves_texts_are_texts_and_step_is_neither() -> None:
    """Nothing of an event's fields is lost but what is neither number nor text."""
    given: dict[str, Any] = {"step": 3, "loss": 2.5, "note": "x", "list": [1]}
    point = point_of("step", given, wall_s=1.0)
    assert point.step == 3
    assert point.numbers == {"step/loss": 2.5}
    assert point.texts == {"step/note": "x"}
    assert point_of("begin", {"layout": "data=2"}, wall_s=1.0).step is None


def test_a_step_of_a_scalar_array_is_a_step() -> None:
    """As a loop that counts in numpy gives it; its event is a point of a curve, no setting."""
    numpy = pytest.importorskip("numpy")
    point = point_of("step", {"step": numpy.int64(3), "loss": numpy.float32(2.5)}, wall_s=1.0)
    assert (point.step, point.numbers) == (3, {"step/loss": 2.5})


def test_every_event_arrives_in_order_from_a_thread_of_its_own() -> None:
    """The training's thread only puts events into a queue."""
    there = Remembering()
    with Tracker(there, name="first", settings={"rate": 1e-3}, system_interval_s=None) as tracker:
        for step in range(500):
            tracker("step", {"step": step, "loss": 1.0})
    assert [point.step for point in there.points] == list(range(500))
    assert there.threads == {"ms-profile-Remembering"}
    (start,) = there.starts
    assert (start.name, start.step, dict(start.settings)) == ("first", 0, {"rate": 1e-3})
    assert there.outcomes == ["finished"]
    assert tracker.lost == 0


@pytest.mark.parametrize(
    ("there", "problem"),
    [
        (Remembering(refuses=True), "ConnectionError: nobody answers"),
        (Remembering(breaks=True), "OSError: the server is full"),
    ],
    ids=["refuses", "breaks"],
)
def test_a_destination_that_fails_is_told_once_and_stops_nothing(
    there: Remembering, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, a count, and the other destination has everything."""
    beside = Remembering()
    with caplog.at_level(logging.WARNING), Tracker(there, beside, system_interval_s=None) as both:
        for step in range(50):
            both("step", {"step": step, "loss": 1.0})
            time.sleep(0.001)
    assert len(beside.points) == 50
    assert both.lost == 50
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_slow_destination_holds_up_neither_the_training_nor_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Events that the queue cannot hold are counted; closing does not wait for what hangs."""
    with Tracker(Remembering(hangs_s=30), close_timeout_s=0.5) as tracker:
        for step in range(13_000):
            tracker("step", {"step": step, "loss": 1.0})
    assert tracker.lost >= 12_000  # the queue holds 10,000, and 1,000 are being written
    assert "queue is full" in caplog.text


HANGS = """
import sys, time
from ms_profile.trackers import Tracker

class Hangs:
    title, measures_system = "Hangs", False
    def check(self): pass
    def open(self, start):
        if sys.argv[1] == "open": time.sleep(36000)
        return self
    def write(self, points):
        if sys.argv[1] == "write": time.sleep(36000)
    def close(self, outcome): time.sleep(36000)

tracker = Tracker(Hangs(), close_timeout_s=0.5, waits=sys.argv[2] == "waits")
for step in range(13_000):
    tracker("step", {"step": step})
if sys.argv[3] == "close":
    tracker.close()
    print("closed", tracker.lost, flush=True)
"""


@pytest.mark.parametrize(
    ("hangs", "waits", "ends"),
    [
        ("write", "drops", "close"),
        ("write", "waits", "close"),
        ("open", "waits", "exit"),
        ("close", "drops", "exit"),
    ],
)
def test_a_process_ends_though_a_destination_hangs_for_hours(
    hangs: str, waits: str, ends: str
) -> None:
    """Handing over, closing and leaving the process are bounded, and what was lost is counted."""
    command = [sys.executable, "-c", HANGS, hangs, waits, ends]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Hangs does not accept events" in done.stderr
    if ends == "close":
        assert int(done.stdout.split()[1]) >= 12_000


def test_a_run_is_closed_though_more_waits_at_its_end_than_the_queue_holds() -> None:
    """As where a long file is read faster than it is shown: all of it arrives, then the end."""
    there = Remembering(hangs_s=0.1)
    with Tracker(there, system_interval_s=None, waits=True) as tracker:
        for step in range(13_000):
            tracker("step", {"step": step})
        assert tracker._feeds[0]._queue.qsize() > 5_000
        tracker._feeds[0]._queue.maxsize = 1  # full, whatever the thread has taken meanwhile
    assert (len(there.points), there.outcomes, tracker.lost) == (13_000, ["finished"], 0)


@pytest.mark.parametrize(
    ("events", "raises", "outcome"),
    [
        ([("end", {"step": 1, "finished": 1})], False, "finished"),
        ([("end", {"step": 1, "finished": 0})], False, "stopped"),
        ([("step", {"step": 1})], False, "finished"),
        ([("step", {"step": 1})], True, "failed"),
    ],
)
def test_a_run_is_closed_as_it_ended(
    events: list[tuple[str, dict[str, int]]], raises: bool, outcome: str
) -> None:
    """By the trainer's last event, else by how the block ends."""
    there = Remembering()
    with pytest.raises(ZeroDivisionError) if raises else nullcontext(), Tracker(there) as tracker:
        for kind, fields in events:
            tracker(kind, fields)
        if raises:
            raise ZeroDivisionError
    assert there.outcomes == [outcome]
    tracker("step", {"step": 2})  # a closed tracker takes nothing, and does not mind
    tracker.close()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "", ".", "a\0b", "x" * 300])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    """In one line, before anything is written; a folder below the destination's is a name."""
    with pytest.raises(TrackerError, match=r"name must be a path inside the destination's folder"):
        Tracker(TensorBoard(tmp_path / "tb"), name=name)
    assert not list(tmp_path.iterdir())
    with Tracker(TensorBoard(tmp_path / "tb"), name="sweep/first") as tracker:
        tracker("step", {"step": 1, "loss": 1.0})
    assert list((tmp_path / "tb" / "sweep" / "first").iterdir())


def test_other_ranks_open_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script under torchrun makes a tracker in each process; the first one's is used."""
    monkeypatch.setenv("RANK", "1")
    with Tracker(TensorBoard(tmp_path / "tb")) as tracker:
        tracker("step", {"step": 1, "loss": 1.0})
    assert not (tmp_path / "tb").exists()


def test_the_process_is_measured_while_it_trains() -> None:
    """Memory and busy processors come as points of the step that is trained."""
    there = Remembering()
    with Tracker(there, system_interval_s=0.05) as tracker:
        tracker("step", {"step": 7, "loss": 1.0})
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    readings = [point for point in there.points if "system/memory_bytes" in point.numbers]
    assert readings
    assert {point.step for point in readings} == {7}
    assert 1e7 < readings[0].numbers["system/memory_bytes"] < 1e11
    assert max(point.numbers["system/processors"] for point in readings) > 0.2


def test_what_cannot_work_is_refused_before_the_training(tmp_path: Path) -> None:
    """A missing library is named with its extra; a folder that is a file is refused."""
    with pytest.raises(TrackerError, match=r"pip install 'ms-profile\[mlflow\]'"):
        need_library("no_such_module", extra="mlflow", package="mlflow-skinny")
    with pytest.raises(TrackerError, match="needs a destination"):
        Tracker()
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrackerError):
        Tracker(TensorBoard(tmp_path / "file"))


TRAINING = """
import sys, time
from ms_profile.trackers import Tracker, TensorBoard
tracker = Tracker(TensorBoard(sys.argv[1]), name="run", settings={"rate": 0.1})
tracker("begin", {"layout": "data=2"})
for step in range(int(sys.argv[2]), int(sys.argv[3])):
    tracker("step", {"step": step, "loss": float(sys.argv[4]) + step})
    tracker("sample", {"step": step, "text": "says *this*"})
print("there", flush=True)
if sys.argv[5] == "hang":
    time.sleep(60)
if sys.argv[5] == "fail":
    raise ZeroDivisionError
"""


def train(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start a script that trains with a tracker and does not close it."""
    command = [sys.executable, "-c", TRAINING, str(folder), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_training_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    """Steps that are done again show the values of the second time alone, as TensorBoard reads."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with train(tmp_path, 0, 30, 0, "hang") as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        until = time.monotonic() + 20  # its thread writes within moments
        while time.monotonic() < until and not list(tmp_path.glob("run/*")):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(killed.pid, signal.SIGKILL)
    with train(tmp_path, 20, 40, 100, "fail") as again:
        again.communicate()
        assert again.returncode == 1
    run = loader.EventAccumulator(str(tmp_path / "run"))
    run.Reload()
    found = [(each.step, each.value) for each in run.Scalars("step/loss")]
    assert found == [(n, n) for n in range(20)] + [(n, 100.0 + n) for n in range(20, 40)]
    (*_, sample) = run.Tensors("sample/text")
    assert (sample.step, list(sample.tensor_proto.string_val)) == (39, [b"says *this*"])
    (*_, settings) = run.Tensors("settings")
    assert b"| begin/layout | data=2 |" in settings.tensor_proto.string_val[0]
    (outcome,) = run.Tensors("outcome")
    assert list(outcome.tensor_proto.string_val) == [b"failed"]


def test_mlflow_has_the_run_and_goes_on_in_it(tmp_path: Path) -> None:
    """Metrics with their steps, settings, name, end; steps done again are not there twice."""
    pytest.importorskip("sqlalchemy")
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    there = MLflow(tmp_path / "run", experiment="tests", tracking_uri=uri)
    for first, rate in ((0, 0.1), (3, 0.2)):
        with Tracker(there, name="named", settings={"rate": rate}, system_interval_s=None) as log:
            log("begin", {"layout": "data=2"})
            for step in range(first, first + 5):
                log("step", {"step": step, "loss": 10.0 * first + step})
            log("end", {"step": first + 5, "finished": int(first > 0)})
        assert log.lost == 0
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "named"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rate": "0.1", "begin/layout": "data=2"}
    assert run.data.tags["changed/rate"] == "0.2"
    history = client.get_metric_history(run.info.run_id, "step/loss")
    found = sorted((each.step, each.value) for each in history)
    assert found == [(n, n) for n in range(5)] + [(n, 30.0 + n) for n in range(5, 8)]


def records(path: Path) -> list[Any]:
    """The records of W&B's offline file: LevelDB's log of protocol buffers."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, parts, found = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):
            record = messages.Record()
            record.ParseFromString(b"".join(parts))
            found.append(record)
            parts = []
    return found


def test_wandb_has_the_run_offline_and_goes_on_in_it(tmp_path: Path) -> None:
    """Both starts write for one run, with the training's own steps, settings, name and end."""
    pytest.importorskip("wandb")
    for first in (0, 3):
        there = Wandb(tmp_path, project="tests", mode="offline")
        with Tracker(there, name="named", settings={"rate": 0.1}) as log:
            log("begin", {"layout": "data=2"})
            for step in range(first, first + 5):
                log("step", {"step": step, "loss": 10.0 * first + step})
        assert log.lost == 0
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    assert len(files) == 2
    runs, points = set(), []
    for file in files:
        for record in records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add((record.run.run_id, record.run.display_name, record.run.project))
                config = {each.key: each.value_json for each in record.run.config.update}
                assert config["rate"] == "0.1"
            if kind == "history":
                named = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                points.append((int(named["training_step"]), float(named["step/loss"])))
            if kind == "exit":
                assert record.exit.exit_code == 0
    assert len(runs) == 1
    ((_, name, project),) = runs
    assert (name, project) == ("named", "tests")
    assert points == [(n, n) for n in range(5)] + [(n, 30.0 + n) for n in range(3, 8)]


LINES = [
    {"time_s": 100.5, "kind": "begin", "steps": 3, "layout": "data=2"},
    *({"time_s": 101.0 + n, "kind": "step", "step": n, "loss": 2.0 - n} for n in range(3)),
    {"time_s": 110.0, "kind": "end", "step": 2, "finished": 1},
]
COMMAND = [sys.executable, "-m", "ms_profile", "track"]


def scalars(folder: Path) -> list[tuple[int, float, float]]:
    """Step, value and time of the loss, as TensorBoard reads them."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = loader.EventAccumulator(str(folder))
    run.Reload()
    return [(each.step, each.value, each.wall_time) for each in run.Scalars("step/loss")]


def test_a_commands_run_is_shown_from_its_events(tmp_path: Path) -> None:
    """Each event with its own time, settings from the run file; a line that is none is named."""
    run = tmp_path / "sft"
    run.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (run / "events.jsonl").write_text(text.replace('"loss": 1.0', '"loss": null'))
    (tmp_path / "RUN.toml").write_text("rate = 0.1\n[layout]\ndata = 2\n")
    given = [str(run), "--to", f"tensorboard={tmp_path / 'tb'}"]
    given += ["--settings", str(tmp_path / "RUN.toml")]
    done = subprocess.run([*COMMAND, *given, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"events": 5, "lost": 0}
    found = scalars(tmp_path / "tb" / "sft")
    assert [(step, wall_s) for step, _, wall_s in found] == [(0, 101.0), (1, 102.0), (2, 103.0)]
    assert math.isnan(found[1][1])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "step"\n')
    again = subprocess.run([*COMMAND, *given], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "line 6 is not an event" in again.stderr


def test_no_secret_of_a_run_file_or_event_reaches_a_destination(tmp_path: Path) -> None:
    """Settings, and events without a step, are masked: whoever has the link sees them."""
    secret = "s3cr3t-value"
    run = tmp_path / "run"
    run.mkdir()
    begin = {"kind": "begin", "time_s": 100.0, "reward_url": f"https://me:{secret}@host/score"}
    lines = [
        begin | {"api_key": secret},
        {"kind": "step", "time_s": 101.0, "step": 0, "loss": 1.0},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "RUN.toml").write_text(
        f'rate = 0.1\n[reward]\napi_key = "{secret}"\nurl = "https://host/x?access_token={secret}"\n'
    )
    given = [str(run), "--to", f"tensorboard={tmp_path / 'tb'}"]
    given += ["--settings", str(tmp_path / "RUN.toml")]
    subprocess.run([*COMMAND, *given], capture_output=True, text=True, check=True)
    content = b"".join(path.read_bytes() for path in (tmp_path / "tb").rglob("*tfevents*"))
    assert b"reward.api_key | ***" in content
    assert b"begin/api_key | ***" in content
    assert secret.encode() not in content


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    """Lines that come later are shown, also one that was written in two parts."""
    lines = [json.dumps(line) + "\n" for line in LINES]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(lines[:2]))
    given = [str(path), "--to", f"tensorboard={tmp_path / 'tb'}", "--name", "x", "--follow"]
    with subprocess.Popen([*COMMAND, *given], stdout=subprocess.PIPE, text=True) as command:
        for part in (lines[2][:9], lines[2][9:], lines[3], lines[4]):
            time.sleep(0.7)
            with path.open("a") as file:
                file.write(part)
        command.communicate(timeout=30)
        assert command.returncode == 0
    assert [step for step, _, _ in scalars(tmp_path / "tb" / "x")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--to", "tensorbord=x"], "use tensorboard=DIR or wandb=DIR or mlflow=DIR"),
        (["--to", "tensorboard=x"], "has no events.jsonl and no event log"),
    ],
)
def test_what_cannot_be_tracked_is_refused(tmp_path: Path, arguments: list[str], line: str) -> None:
    """One line, exit code 2."""
    command = [*COMMAND, str(tmp_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


WHOLE = "".join(json.dumps(line) + "\n" for line in LINES).encode()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4)), max_size=4))
def test_a_damaged_events_file_costs_its_damaged_lines(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    """Whatever stands in it, lines are events or problems, and all that is read is a point."""
    content = bytearray(WHOLE)
    for at, new in damage:
        content[at : at + len(new)] = new
    path = tmp_path_factory.mktemp("damage") / "events.jsonl"
    path.write_bytes(content)
    problems: list[str] = []
    events = list(read_json_lines(path, on_problem=problems.append))
    assert len(events) + len(problems) <= content.count(b"\n")
    assert len(events) >= len(LINES) - 2 * len(damage) - 1
    for event in events:
        point_of(event.kind, event.fields, wall_s=event.wall_ns / 1e9)


def test_steps_that_a_resumed_run_does_again_are_shown_once(tmp_path: Path) -> None:
    """A file in which steps 0 to 5 stand, then a resume at 2 and steps 3 to 6: the last of each."""
    lines: list[dict[str, Any]] = [
        {"time_s": 100.0 + n, "kind": "step", "step": n, "loss": float(n)} for n in range(6)
    ]
    lines.append({"time_s": 200.0, "kind": "resume", "step": 2, "checkpoint": "step-2"})
    lines += [
        {"time_s": 201.0 + n, "kind": "step", "step": n, "loss": 10.0 + n} for n in range(3, 7)
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [str(path), "--to", f"tensorboard={tmp_path / 'tb'}", "--name", "x"]
    subprocess.run([*COMMAND, *given], capture_output=True, check=True)
    again = [(step, value) for step, value, _ in scalars(tmp_path / "tb" / "x")]
    assert again == [(n, float(n)) for n in range(3)] + [(n, 10.0 + n) for n in range(3, 7)]


def test_a_run_that_begins_with_a_resume_keeps_the_step_of_its_checkpoint(tmp_path: Path) -> None:
    """Steps up to the checkpoint stay, those behind it are done again."""
    for lines in (
        [("step", {"step": n, "loss": float(n)}) for n in range(6)],
        [("resume", {"step": 2}), ("step", {"step": 3, "loss": 13.0})],
    ):
        with Tracker(TensorBoard(tmp_path), system_interval_s=None) as log:
            for kind, fields in lines:
                log(kind, fields)
    found = [(step, value) for step, value, _ in scalars(tmp_path)]
    assert found == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0)]

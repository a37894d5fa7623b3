"""Trackers: data sent to TensorBoard, W&B and MLflow, without delaying the training."""

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
"""Block size of W&B's file in bytes; its format is LevelDB's log."""


class InMemoryDestination:
    """A destination in this process that can be slow or fail."""

    title = "InMemory"
    measures_system = False

    def __init__(self, *, refuses: bool = False, breaks: bool = False, hangs_s: float = 0) -> None:
        self.refuses, self.breaks, self.hangs_s = refuses, breaks, hangs_s
        self.starts: list[RunStart] = []
        self.points: list[Point] = []
        self.threads: set[str] = set()
        self.outcomes: list[str] = []

    def check(self) -> None:
        """This destination has no requirements."""

    def open(self, start: RunStart, /) -> "InMemoryDestination":
        """Record the start."""
        if self.refuses:
            raise ConnectionError("nobody\nanswers")
        self.starts.append(start)
        return self

    def write(self, points: Sequence[Point], /) -> None:
        """Record the points."""
        time.sleep(self.hangs_s)
        if self.breaks:
            raise OSError("the server is full")
        self.threads.add(threading.current_thread().name)
        self.points += points

    def close(self, outcome: str, /) -> None:
        """Record the outcome."""
        self.outcomes.append(outcome)


def test_numbers_are_curves_texts_are_texts_and_step_is_neither() -> None:
    """Fields of other types are dropped."""
    fields: dict[str, Any] = {"step": 3, "loss": 2.5, "note": "x", "list": [1]}
    point = point_of("step", fields, wall_s=1.0)
    assert point.step == 3
    assert point.numbers == {"step/loss": 2.5}
    assert point.texts == {"step/note": "x"}
    assert point_of("begin", {"layout": "data=2"}, wall_s=1.0).step is None


def test_a_numpy_step_is_a_step() -> None:
    """A loop may count in numpy; its event is a point of a curve, not a setting."""
    numpy = pytest.importorskip("numpy")
    point = point_of("step", {"step": numpy.int64(3), "loss": numpy.float32(2.5)}, wall_s=1.0)
    assert (point.step, point.numbers) == (3, {"step/loss": 2.5})


def test_every_event_arrives_in_order_from_a_background_thread() -> None:
    """The training thread only puts events into a queue."""
    destination = InMemoryDestination()
    with Tracker(
        destination, name="first", settings={"rate": 1e-3}, system_interval_s=None
    ) as tracker:
        for step in range(500):
            tracker("step", {"step": step, "loss": 1.0})
    assert [point.step for point in destination.points] == list(range(500))
    assert destination.threads == {"ms-profile-InMemory"}
    (start,) = destination.starts
    assert (start.name, start.step, dict(start.settings)) == ("first", 0, {"rate": 1e-3})
    assert destination.outcomes == ["finished"]
    assert tracker.lost == 0


@pytest.mark.parametrize(
    ("failing", "problem"),
    [
        (InMemoryDestination(refuses=True), "ConnectionError: nobody answers"),
        (InMemoryDestination(breaks=True), "OSError: the server is full"),
    ],
    ids=["refuses", "breaks"],
)
def test_a_failing_destination_is_reported_once_and_stops_nothing(
    failing: InMemoryDestination, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning and a count of lost events; the other destination gets everything."""
    working = InMemoryDestination()
    with (
        caplog.at_level(logging.WARNING),
        Tracker(failing, working, system_interval_s=None) as tracker,
    ):
        for step in range(50):
            tracker("step", {"step": step, "loss": 1.0})
            time.sleep(0.001)
    assert len(working.points) == 50
    assert tracker.lost == 50
    (record,) = caplog.records
    assert problem in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_slow_destination_delays_neither_training_nor_exit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Events beyond the queue's size are counted; closing does not wait for the destination."""
    with Tracker(InMemoryDestination(hangs_s=30), close_timeout_s=0.5) as tracker:
        for step in range(13_000):
            tracker("step", {"step": step, "loss": 1.0})
    assert tracker.lost >= 12_000  # 10,000 are queued, and 1,000 are being written
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
def test_a_process_exits_although_a_destination_hangs(hangs: str, waits: str, ends: str) -> None:
    """Queueing, closing and exiting have time limits, and lost events are counted."""
    command = [sys.executable, "-c", HANGS, hangs, waits, ends]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    assert "Hangs does not accept events" in process.stderr
    if ends == "close":
        assert int(process.stdout.split()[1]) >= 12_000


def test_a_run_is_closed_when_its_queue_is_full() -> None:
    """When a long file is read faster than it is written, everything arrives, then the end."""
    destination = InMemoryDestination(hangs_s=0.1)
    with Tracker(destination, system_interval_s=None, waits=True) as tracker:
        for step in range(13_000):
            tracker("step", {"step": step})
        assert tracker._feeds[0]._queue.qsize() > 5_000
        tracker._feeds[0]._queue.maxsize = 1  # full, whatever the thread has consumed
    assert (len(destination.points), destination.outcomes, tracker.lost) == (
        13_000,
        ["finished"],
        0,
    )


@pytest.mark.parametrize(
    ("events", "raises", "outcome"),
    [
        ([("end", {"step": 1, "finished": 1})], False, "finished"),
        ([("end", {"step": 1, "finished": 0})], False, "stopped"),
        ([("step", {"step": 1})], False, "finished"),
        ([("step", {"step": 1})], True, "failed"),
    ],
)
def test_a_run_is_closed_with_its_outcome(
    events: list[tuple[str, dict[str, int]]], raises: bool, outcome: str
) -> None:
    """From the trainer's last event, otherwise from how the block ends."""
    destination = InMemoryDestination()
    with (
        pytest.raises(ZeroDivisionError) if raises else nullcontext(),
        Tracker(destination) as tracker,
    ):
        for kind, fields in events:
            tracker(kind, fields)
        if raises:
            raise ZeroDivisionError
    assert destination.outcomes == [outcome]
    tracker("step", {"step": 2})  # a closed tracker ignores events without an error
    tracker.close()


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/tmp/x", "", ".", "a\0b", "x" * 300])
def test_a_name_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    """One line, before anything is written; a subfolder is a valid name."""
    with pytest.raises(TrackerError, match=r"name must be a path inside the destination's folder"):
        Tracker(TensorBoard(tmp_path / "tb"), name=name)
    assert not list(tmp_path.iterdir())
    with Tracker(TensorBoard(tmp_path / "tb"), name="sweep/first") as tracker:
        tracker("step", {"step": 1, "loss": 1.0})
    assert list((tmp_path / "tb" / "sweep" / "first").iterdir())


def test_only_rank_0_opens_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script under torchrun creates a tracker in every process; only rank 0's is used."""
    monkeypatch.setenv("RANK", "1")
    with Tracker(TensorBoard(tmp_path / "tb")) as tracker:
        tracker("step", {"step": 1, "loss": 1.0})
    assert not (tmp_path / "tb").exists()


def test_the_process_is_measured_while_it_trains() -> None:
    """Memory and CPU use are points of the current step."""
    destination = InMemoryDestination()
    with Tracker(destination, system_interval_s=0.05) as tracker:
        tracker("step", {"step": 7, "loss": 1.0})
        deadline = time.process_time() + 0.3
        while time.process_time() < deadline:
            pass
    readings = [point for point in destination.points if "system/memory_bytes" in point.numbers]
    assert readings
    assert {point.step for point in readings} == {7}
    assert 1e7 < readings[0].numbers["system/memory_bytes"] < 1e11
    assert max(point.numbers["system/processors"] for point in readings) > 0.2


def test_unusable_destinations_are_refused_before_training(tmp_path: Path) -> None:
    """The error names a missing library's extra; a file instead of a folder is refused."""
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


def test_a_killed_training_resumes_in_the_same_curves(tmp_path: Path) -> None:
    """TensorBoard shows only the newer values of repeated steps."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with train(tmp_path, 0, 30, 0, "hang") as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        deadline = time.monotonic() + 20  # the thread writes almost immediately
        while time.monotonic() < deadline and not list(tmp_path.glob("run/*")):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(killed.pid, signal.SIGKILL)
    with train(tmp_path, 20, 40, 100, "fail") as resumed:
        resumed.communicate()
        assert resumed.returncode == 1
    run = loader.EventAccumulator(str(tmp_path / "run"))
    run.Reload()
    loss_points = [(scalar.step, scalar.value) for scalar in run.Scalars("step/loss")]
    assert loss_points == [(n, n) for n in range(20)] + [(n, 100.0 + n) for n in range(20, 40)]
    (*_, sample) = run.Tensors("sample/text")
    assert (sample.step, list(sample.tensor_proto.string_val)) == (39, [b"says *this*"])
    (*_, settings) = run.Tensors("settings")
    assert b"| begin/layout | data=2 |" in settings.tensor_proto.string_val[0]
    (outcome,) = run.Tensors("outcome")
    assert list(outcome.tensor_proto.string_val) == [b"failed"]


def test_mlflow_resumes_the_same_run(tmp_path: Path) -> None:
    """Metrics with steps, settings, name and end; repeated steps do not appear twice."""
    pytest.importorskip("sqlalchemy")
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    destination = MLflow(tmp_path / "run", experiment="tests", tracking_uri=uri)
    for first, rate in ((0, 0.1), (3, 0.2)):
        with Tracker(
            destination, name="named", settings={"rate": rate}, system_interval_s=None
        ) as log:
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
    loss_points = sorted((metric.step, metric.value) for metric in history)
    assert loss_points == [(n, n) for n in range(5)] + [(n, 30.0 + n) for n in range(5, 8)]


def records(path: Path) -> list[Any]:
    """Return the records of W&B's offline file, a LevelDB log of protocol buffers."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, position, parts, loaded = path.read_bytes(), 7, [], []
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, size, record_kind = struct.unpack("<IHB", data[position : position + 7])
        parts.append(data[position + 7 : position + 7 + size])
        position += 7 + size
        if record_kind in (1, 4):
            record = messages.Record()
            record.ParseFromString(b"".join(parts))
            loaded.append(record)
            parts = []
    return loaded


def test_wandb_resumes_the_same_offline_run(tmp_path: Path) -> None:
    """Both starts write to one run, with the training's own steps, settings and name."""
    pytest.importorskip("wandb")
    for first in (0, 3):
        destination = Wandb(tmp_path, project="tests", mode="offline")
        with Tracker(destination, name="named", settings={"rate": 0.1}) as log:
            log("begin", {"layout": "data=2"})
            for step in range(first, first + 5):
                log("step", {"step": step, "loss": 10.0 * first + step})
        assert log.lost == 0
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    assert len(files) == 2
    runs, points = set(), []
    for file in files:
        for record in records(file):
            record_kind = record.WhichOneof("record_type")
            if record_kind == "run":
                runs.add((record.run.run_id, record.run.display_name, record.run.project))
                config = {entry.key: entry.value_json for entry in record.run.config.update}
                assert config["rate"] == "0.1"
            if record_kind == "history":
                values = {
                    "/".join(item.nested_key) or item.key: item.value_json
                    for item in record.history.item
                }
                points.append((int(values["training_step"]), float(values["step/loss"])))
            if record_kind == "exit":
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
    """Return step, value and time of the loss, as read by TensorBoard."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = loader.EventAccumulator(str(folder))
    run.Reload()
    return [(scalar.step, scalar.value, scalar.wall_time) for scalar in run.Scalars("step/loss")]


def test_the_track_command_sends_logged_events(tmp_path: Path) -> None:
    """Every event with its own time, plus settings from the run file; a bad line is named."""
    run = tmp_path / "sft"
    run.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    (run / "events.jsonl").write_text(text.replace('"loss": 1.0', '"loss": null'))
    (tmp_path / "RUN.toml").write_text("rate = 0.1\n[layout]\ndata = 2\n")
    arguments = [str(run), "--to", f"tensorboard={tmp_path / 'tb'}"]
    arguments += ["--settings", str(tmp_path / "RUN.toml")]
    process = subprocess.run(
        [*COMMAND, *arguments, "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(process.stdout) == {"events": 5, "lost": 0}
    loss_points = scalars(tmp_path / "tb" / "sft")
    assert [(step, wall_s) for step, _, wall_s in loss_points] == [
        (0, 101.0),
        (1, 102.0),
        (2, 103.0),
    ]
    assert math.isnan(loss_points[1][1])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"kind": "step"\n')
    second_run = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    assert second_run.returncode == 1
    assert "line 6 is not an event" in second_run.stderr


def test_secrets_are_masked_in_settings_and_events(tmp_path: Path) -> None:
    """Anyone with the link can see settings and events without a step."""
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
    arguments = [str(run), "--to", f"tensorboard={tmp_path / 'tb'}"]
    arguments += ["--settings", str(tmp_path / "RUN.toml")]
    subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=True)
    content = b"".join(path.read_bytes() for path in (tmp_path / "tb").rglob("*tfevents*"))
    assert b"reward.api_key | ***" in content
    assert b"begin/api_key | ***" in content
    assert secret.encode() not in content


def test_a_run_is_followed_to_its_end(tmp_path: Path) -> None:
    """Later lines are sent too, including a line written in two parts."""
    lines = [json.dumps(line) + "\n" for line in LINES]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(lines[:2]))
    arguments = [str(path), "--to", f"tensorboard={tmp_path / 'tb'}", "--name", "x", "--follow"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True) as command:
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
def test_untrackable_input_is_refused(tmp_path: Path, arguments: list[str], line: str) -> None:
    """One line and exit code 2."""
    command = [*COMMAND, str(tmp_path), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert process.returncode == 2
    assert line in process.stderr
    assert process.stderr.count("\n") == 1


EVENTS_BYTES = "".join(json.dumps(line) + "\n" for line in LINES).encode()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(EVENTS_BYTES) - 1), st.binary(max_size=4)), max_size=4)
)
def test_a_damaged_events_file_loses_only_damaged_lines(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    """Every line is an event or a reported problem, and every event converts to a point."""
    content = bytearray(EVENTS_BYTES)
    for position, replacement in damage:
        content[position : position + len(replacement)] = replacement
    path = tmp_path_factory.mktemp("damage") / "events.jsonl"
    path.write_bytes(content)
    problems: list[str] = []
    events = list(read_json_lines(path, on_problem=problems.append))
    assert len(events) + len(problems) <= content.count(b"\n")
    assert len(events) >= len(LINES) - 2 * len(damage) - 1
    for event in events:
        point_of(event.kind, event.fields, wall_s=event.wall_ns / 1e9)


def test_repeated_steps_of_a_resumed_run_are_shown_once(tmp_path: Path) -> None:
    """Steps 0 to 5, a resume at step 2, then steps 3 to 6: the newest value of each."""
    lines: list[dict[str, Any]] = [
        {"time_s": 100.0 + n, "kind": "step", "step": n, "loss": float(n)} for n in range(6)
    ]
    lines.append({"time_s": 200.0, "kind": "resume", "step": 2, "checkpoint": "step-2"})
    lines += [
        {"time_s": 201.0 + n, "kind": "step", "step": n, "loss": 10.0 + n} for n in range(3, 7)
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = [str(path), "--to", f"tensorboard={tmp_path / 'tb'}", "--name", "x"]
    subprocess.run([*COMMAND, *arguments], capture_output=True, check=True)
    loss_points = [(step, value) for step, value, _ in scalars(tmp_path / "tb" / "x")]
    assert loss_points == [(n, float(n)) for n in range(3)] + [(n, 10.0 + n) for n in range(3, 7)]


def test_a_resume_keeps_steps_up_to_its_checkpoint(tmp_path: Path) -> None:
    """Later steps are replaced when they are repeated."""
    for lines in (
        [("step", {"step": n, "loss": float(n)}) for n in range(6)],
        [("resume", {"step": 2}), ("step", {"step": 3, "loss": 13.0})],
    ):
        with Tracker(TensorBoard(tmp_path), system_interval_s=None) as log:
            for kind, fields in lines:
                log(kind, fields)
    loss_points = [(step, value) for step, value, _ in scalars(tmp_path)]
    assert loss_points == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0)]

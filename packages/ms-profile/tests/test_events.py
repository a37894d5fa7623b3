"""The event log: recording, crash safety and reading."""

import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_profile.errors import EventError, FormatError
from ms_profile.log.blocks import Block, Damage, pack_block, scan_blocks
from ms_profile.log.event_log import Event, EventLog, Segment, StepMetrics
from ms_profile.log.event_reader import EventFilter, follow_events, read_events
from ms_profile.log.tensorboard import export_tensorboard

VALUES = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=8), st.dictionaries(st.text(max_size=8), VALUES))))
def test_recorded_events_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, dict[str, int]]]
) -> None:
    """Kinds and fields of any content are equal and in order."""
    folder = tmp_path_factory.mktemp("log")
    with EventLog(folder) as log:
        for kind, fields in records:
            log(kind, fields)
    assert [(event.kind, event.fields) for event in read_events(folder)] == records


def test_an_event_carries_rank_step_and_both_clocks(tmp_path: Path) -> None:
    """The clocks are read at the time of the call."""
    start_ns = time.monotonic_ns(), time.time_ns()
    with EventLog(tmp_path, rank=3, world_size=4) as log:
        log("step", {"step": 7, "loss": 2.5})
    (event,) = read_events(tmp_path)
    assert (event.rank, event.step) == (3, 7)
    assert start_ns[0] <= event.monotonic_ns <= time.monotonic_ns()
    assert start_ns[1] <= event.wall_ns <= time.time_ns()
    first = next(scan_blocks((tmp_path / "rank-00003.000000.events").read_bytes()))
    assert isinstance(first, Block)
    segment = msgspec.msgpack.decode(first.content, type=Segment)
    assert (segment.rank, segment.world_size, segment.pid) == (3, 4, os.getpid())


def test_numpy_scalars_become_plain_numbers(tmp_path: Path) -> None:
    """A loss is often a numpy or torch scalar."""
    with EventLog(tmp_path) as log:
        log("step", {"step": np.int64(1), "loss": np.float32(0.5)})  # type: ignore[dict-item]
    (event,) = read_events(tmp_path)
    assert event.fields == {"step": 1, "loss": 0.5}
    assert event.step == 1


@pytest.mark.parametrize("value", [None, [1], b"x", np.zeros(2)])
def test_other_values_are_refused_by_name(tmp_path: Path, value: object) -> None:
    """The message has the event, the field and the type."""
    with EventLog(tmp_path) as log, pytest.raises(EventError, match="'step', field 'bad'"):
        log("step", {"bad": value})  # type: ignore[dict-item]


def test_step_metrics_are_typed() -> None:
    """Events of kind `step` convert to a record; a field of a wrong type is named."""
    event = Event(0, "step", 1, 0, 0, {"step": 1, "loss": 2.0, "mine": "x"})
    assert StepMetrics.of(event) == StepMetrics(step=1, loss=2.0)
    with pytest.raises(EventError, match="loss"):
        StepMetrics.of(Event(0, "step", 1, 0, 0, {"step": 1, "loss": "high"}))


WRITER = """
import sys, time
from ms_profile.log.event_log import EventLog
log = EventLog(sys.argv[1], flush_interval_s=0.05)
for number in range(10**9):
    log("step", {"step": number, "loss": number / 7})
    if number == 3000:
        log.flush()
        print("flushed", flush=True)
"""


@pytest.mark.parametrize("repeat", range(3))
def test_flushed_events_survive_kill_9(tmp_path: Path, repeat: int) -> None:
    """After SIGKILL at a random moment, a gapless prefix with all flushed events can be read."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "flushed\n"
    time.sleep(0.03 * repeat)
    writer.kill()
    assert writer.wait(10) == -signal.SIGKILL
    writer.stdout.close()
    steps = [event.step for event in read_events(tmp_path)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 3001


def test_an_idle_process_flushes_within_the_interval(tmp_path: Path) -> None:
    """A rank that hangs right after an event still reports it."""
    with EventLog(tmp_path, flush_interval_s=0.05) as log:
        log("hang", {"where": "all_reduce"})
        deadline = time.monotonic() + 10
        while not list(read_events(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [event.kind for event in read_events(tmp_path)] == ["hang"]


def test_files_are_rotated_and_the_oldest_removed(tmp_path: Path) -> None:
    """Disk use is bounded, and the newest events are preserved."""
    random = np.random.default_rng(0)
    with EventLog(tmp_path, segment_bytes=200_000, segments=3) as log:
        for number in range(4000):
            log("note", {"step": number, "text": random.bytes(200).hex()})
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert files[0].name != "rank-00000.000000.events"
    assert sum(path.stat().st_size for path in files) < 3 * 200_000 + 3 * 70_000
    steps = [event.step for event in read_events(tmp_path)]
    assert steps[-1] == 3999
    assert steps == list(range(steps[0] or 0, 4000))


def test_a_second_log_continues_after_the_first(tmp_path: Path) -> None:
    """A restarted rank adds files and changes none."""
    for number in range(3):
        with EventLog(tmp_path) as log:
            log("start", {"step": number})
    assert [event.step for event in read_events(tmp_path)] == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8), st.data())
def test_damage_loses_only_the_damaged_blocks(contents: list[bytes], data: st.DataObject) -> None:
    """All other blocks are read, and the damaged one is never accepted."""
    packed = [pack_block(content, number) for number, content in enumerate(contents)]
    log_bytes = bytearray(b"".join(packed))
    position = data.draw(st.integers(0, len(log_bytes) - 1))
    log_bytes[position] ^= data.draw(st.integers(1, 255))
    intact = [item.content for item in scan_blocks(bytes(log_bytes)) if isinstance(item, Block)]
    starts = np.cumsum([0, *map(len, packed)])
    damaged = int(np.searchsorted(starts, position, side="right")) - 1
    assert intact == contents[:damaged] + contents[damaged + 1 :]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=4), st.data())
def test_a_truncated_file_is_torn_at_its_last_block(
    contents: list[bytes], data: st.DataObject
) -> None:
    """Any prefix of a file gives its complete blocks, then at most one torn part."""
    log_bytes = b"".join(pack_block(content, n) for n, content in enumerate(contents))
    cut = data.draw(st.integers(0, len(log_bytes)))
    scanned = list(scan_blocks(log_bytes[:cut]))
    blocks = [item.content for item in scanned if isinstance(item, Block)]
    assert blocks == contents[: len(blocks)]
    damage = [item for item in scanned if isinstance(item, Damage)]
    assert all(item.torn for item in damage)
    assert len(damage) <= 1


def test_damage_is_reported_by_file_and_byte(tmp_path: Path) -> None:
    """The reader reports the file, the position, and the number of skipped bytes."""
    with EventLog(tmp_path) as log:
        log("a", {})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    problems: list[str] = []
    assert list(read_events(tmp_path, on_problem=problems.append)) == []
    assert len(problems) == 1
    assert "ends inside a block at byte" in problems[0]


def test_repeated_blocks_are_read_once(tmp_path: Path) -> None:
    """If the file system repeats part of a file, no events are added and the reader reports it."""
    with EventLog(tmp_path) as log:
        log("a", {"step": 1})
    expected = list(read_events(tmp_path))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() * 2)
    problems: list[str] = []
    assert list(read_events(tmp_path, on_problem=problems.append)) == expected
    assert any("repeats a block" in problem for problem in problems)


def test_missing_and_repeated_blocks_are_reported(tmp_path: Path) -> None:
    """Checksums of whole blocks are valid, so their numbers reveal missing or repeated ones."""
    with EventLog(tmp_path) as log:
        for step in range(4):
            log("a", {"step": step})
            log.flush()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    segment, *blocks = [item for item in scan_blocks(data) if isinstance(item, Block)]
    assert [block.number for block in blocks] == [1, 2, 3, 4]
    block_ends = [segment.end, *(block.end for block in blocks)]
    parts = [data[: block_ends[0]], *(data[start:end] for start, end in pairwise(block_ends))]
    problems: list[str] = []

    def steps(order: list[int]) -> list[int | None]:
        problems.clear()
        path.write_bytes(b"".join(parts[number] for number in order))
        return [event.step for event in read_events(tmp_path, on_problem=problems.append)]

    assert steps([0, 1, 2, 3, 4]) == [0, 1, 2, 3]
    assert problems == []
    assert steps([0, 1, 4]) == [0, 3]
    assert problems == [f"{path.name} lacks 2 blocks; their events are lost"]
    assert steps([1, 2]) == [0, 1]
    assert problems == [f"{path.name} lacks 1 blocks; their events are lost"]
    assert steps([0, 1, 2, 1, 2]) == [0, 1]
    assert [problem.partition(",")[0] for problem in problems] == [
        f"{path.name} repeats a block"
    ] * 2


def test_a_full_disk_leaves_no_gap_in_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that could not be written are written later, and nothing is reported lost."""
    with EventLog(tmp_path) as log:
        log("a", {"step": 0})
        log.flush()
        log("a", {"step": 1})
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            log.flush()
        log("a", {"step": 2})
    problems: list[str] = []
    steps = [event.step for event in read_events(tmp_path, on_problem=problems.append)]
    assert steps == [0, 1, 2]
    assert problems == []


def test_following_a_log_reads_no_block_twice(tmp_path: Path) -> None:
    """A repeated part of the file adds no events there either."""
    with EventLog(tmp_path) as log:
        log("a", {"step": 1})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes() * 2)
    assert [event.step for event in follow_events(tmp_path, until=lambda: True)] == [1]


def test_following_a_log_reports_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, with its position; later events are still read."""
    with EventLog(tmp_path) as log:
        log("a", {"step": 1})
        log.flush()
        (path,) = tmp_path.iterdir()
        size = path.stat().st_size
        log("a", {"step": 2})
        log.flush()
        damage_end = path.stat().st_size
        log("a", {"step": 3})
    content = bytearray(path.read_bytes())
    content[damage_end - 1] ^= 1
    path.write_bytes(content)
    assert [event.step for event in follow_events(tmp_path, until=lambda: True)] == [1, 3]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == f"{path.name} is damaged at byte {size}; skipping {damage_end - size} bytes"


def test_ranks_are_merged_by_wall_time_and_filtered(tmp_path: Path) -> None:
    """Events of all ranks in one order; filters by kind, rank and step."""
    logs = [EventLog(tmp_path, rank=rank) for rank in range(3)]
    for step in range(4):
        for log in logs:
            log("step" if step % 2 else "note", {"step": step})
    for log in logs:
        log.close()
    merged = list(read_events(tmp_path))
    assert len(merged) == 12
    assert [event.step for event in merged] == sorted(event.step or 0 for event in merged)
    filtered = read_events(tmp_path, EventFilter(kinds={"step"}, ranks={1, 2}, first_step=2))
    assert [(event.rank, event.step) for event in filtered] == [(1, 3), (2, 3)]


def test_a_growing_log_is_followed(tmp_path: Path) -> None:
    """Every event appears once after its flush, across rotation; then following ends."""
    steps: list[int | None] = []
    with EventLog(tmp_path, segment_bytes=100) as log:
        log("step", {"step": 0})
        log.flush()
        for event in follow_events(tmp_path, poll_s=0.01, until=lambda: len(steps) > 4):
            steps.append(event.step)
            if len(steps) < 6:
                log("step", {"step": len(steps)})
                log.flush()
    assert len(list(tmp_path.iterdir())) > 3
    assert steps == [0, 1, 2, 3, 4, 5]


def test_a_folder_without_events_is_named(tmp_path: Path) -> None:
    """The error names the folder and the missing files."""
    with pytest.raises(FormatError, match="has no event files"):
        read_events(tmp_path)


FULL = """
import logging, resource, signal, sys
from ms_profile.log.event_log import EventLog
logging.basicConfig()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
log = EventLog(sys.argv[1])
import os
for number in range(40):
    log("note", {"step": number, "text": os.urandom(1000).hex()})
    log.flush()
log.close()
print(log.lost)
"""


def test_a_full_disk_loses_events_with_one_warning(tmp_path: Path) -> None:
    """A file size limit of 20 kB stands in for a full disk: the file stays valid."""
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("cannot write events") == 1
    problems: list[str] = []
    events = list(read_events(tmp_path, on_problem=problems.append))
    assert problems == []
    assert 0 < len(events) == 40 - int(run.stdout)


def test_a_forked_child_cannot_write_to_its_parents_log(tmp_path: Path) -> None:
    """Two processes would corrupt the file, so the child gets an error."""
    log = EventLog(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            log("x", {})
        except EventError:
            os._exit(17)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17
    log.close()


INTERRUPTED = """
import os, signal, sys
from ms_profile.log.event_log import EventLog
log = EventLog(sys.argv[1])
signal.signal(signal.SIGALRM, lambda *_: (log("alarm", {}), log.flush()))
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for number in range(20_000):
    log("step", {"step": number})
signal.setitimer(signal.ITIMER_REAL, 0)
log.close()
"""


def test_a_signal_handler_may_record_and_flush(tmp_path: Path) -> None:
    """For example when SIGTERM interrupts a call: every block stays intact."""
    subprocess.run([sys.executable, "-c", INTERRUPTED, str(tmp_path)], check=True, timeout=60)
    problems: list[str] = []
    events = list(read_events(tmp_path, on_problem=problems.append))
    assert problems == []
    steps = [event.step for event in events if event.kind == "step"]
    assert sorted(step or 0 for step in steps) == list(range(20_000))
    assert any(event.kind == "alarm" for event in events)


def test_a_closed_log_refuses_events(tmp_path: Path) -> None:
    """Closing twice is allowed."""
    log = EventLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(EventError, match="closed"):
        log("x", {})


def test_tensorboard_reads_the_export(tmp_path: Path) -> None:
    """TensorBoard's loader reads every scalar with its step and value, one run per rank."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for rank in range(2):
        with EventLog(tmp_path / "log", rank=rank) as log:
            log("step", {"step": 5, "loss": 2.5 + rank, "note": "text is left out"})
            log("step", {"step": 300, "loss": math.pi})
            log("start", {"world": 2})
    assert export_tensorboard(read_events(tmp_path / "log"), tmp_path / "tb") == 4
    for rank in range(2):
        run = loader.EventAccumulator(str(tmp_path / "tb" / f"rank-{rank:05d}"))
        run.Reload()
        loss_points = [(scalar.step, scalar.value) for scalar in run.Scalars("step/loss")]
        assert loss_points == [(5, 2.5 + rank), (300, pytest.approx(math.pi, rel=1e-7))]


def test_a_file_removed_during_reading_loses_only_its_events(
    tmp_path: Path,
) -> None:
    """A live, bounded log may drop its oldest file after a reader has listed it."""
    with EventLog(tmp_path, rank=0, segment_bytes=400, segments=50) as log:
        for step in range(200):
            log("step", {"step": step, "note": f"{step * 7919 % 10007}"})
            if step % 20 == 0:
                log.flush()
    (tmp_path / "rank-old.events").write_bytes(b"not ours")
    all_steps = [event.step for event in read_events(tmp_path)]
    assert all_steps == list(range(200))
    events = read_events(tmp_path)
    min(tmp_path.glob("rank-0*.events")).unlink()
    remaining = [event.step for event in events]
    assert 0 < len(remaining) < 200
    assert remaining == all_steps[-len(remaining) :]

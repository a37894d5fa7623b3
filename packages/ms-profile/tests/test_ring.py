"""The ring: capacity, crash safety and the cost of a span."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_profile.errors import FormatError, RecordError
from ms_profile.log.ring import Kind, Ring, read_ring


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 60), capacity=st.integers(2, 20))
def test_the_newest_spans_are_kept_in_order(
    tmp_path_factory: pytest.TempPathFactory, count: int, capacity: int
) -> None:
    """One slot of a full ring is sacrificed, as it may be half overwritten."""
    path = tmp_path_factory.mktemp("ring") / "a.ring"
    ring = Ring(path, capacity=capacity)
    name = ring.name("x")
    for number in range(count):
        ring.record(name, Kind.OTHER, number, number + 1)
    recording = read_ring(path)
    count_kept = min(count, capacity - 1) if count >= capacity else count
    assert recording.spans["start_ns"].tolist() == list(range(count - count_kept, count))
    assert recording.dropped == count - count_kept
    ring.close()


def test_a_span_has_name_kind_step_and_times(tmp_path: Path) -> None:
    """A finished span has both times, an open one an end of zero."""
    ring = Ring(tmp_path / "r", rank=5)
    ring.step = 12
    start_ns = time.monotonic_ns()
    outer = ring.begin(ring.name("model"), Kind.FORWARD)
    inner = ring.begin(ring.name("block"), Kind.MODULE)
    ring.end(inner)
    recording = read_ring(tmp_path / "r")
    assert (recording.rank, [recording.name_of(n) for n in recording.spans["name"]]) == (
        5,
        ["model", "block"],
    )
    assert recording.spans["kind"].tolist() == [Kind.FORWARD, Kind.MODULE]
    assert recording.spans["step"].tolist() == [12, 12]
    assert recording.spans["end_ns"][0] == 0
    assert (
        start_ns
        <= recording.spans["start_ns"][0]
        <= recording.spans["end_ns"][1]
        <= time.monotonic_ns()
    )
    ring.end(outer)
    assert read_ring(tmp_path / "r").spans["end_ns"][0] > 0
    ring.close()


def test_ending_an_overwritten_span_changes_nothing(tmp_path: Path) -> None:
    """Its slot belongs to a newer span."""
    ring = Ring(tmp_path / "r", capacity=4)
    name = ring.name("x")
    outer = ring.begin(name, Kind.STEP)
    for number in range(8):
        ring.record(name, Kind.OTHER, number, 1000)
    ring.end(outer)
    assert set(read_ring(tmp_path / "r").spans["end_ns"].tolist()) == {1000}
    ring.close()


def test_a_full_name_table_loses_names_but_no_spans(tmp_path: Path) -> None:
    """Later names read as "(name table full)"; earlier ones stay."""
    ring = Ring(tmp_path / "r")
    numbers = [ring.name(f"{number}-{'x' * 400}") for number in range(1000)]
    assert numbers[0] == 1
    assert numbers[-1] == 0
    ring.record(numbers[-1], Kind.OTHER, 1, 2)
    recording = read_ring(tmp_path / "r")
    assert recording.name_of(recording.spans["name"][0]) == "(name table full)"
    assert recording.name_of(1).startswith("0-x")
    ring.close()


WRITER = """
import sys
from ms_profile.log.ring import Kind, Ring
ring = Ring(sys.argv[1], capacity=512)
name = ring.name("span")
print("ready", flush=True)
while True:
    ring.end(ring.begin(name, Kind.MODULE))
"""


@pytest.mark.parametrize("repeat", range(3))
def test_spans_survive_kill_9_intact_and_without_gaps(tmp_path: Path, repeat: int) -> None:
    """After SIGKILL during writing, consecutive valid spans are read; the last may be open."""
    path = tmp_path / "r"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    time.sleep(0.05 + 0.037 * repeat)
    writer.kill()
    assert writer.wait(10) == -signal.SIGKILL
    writer.stdout.close()
    spans = read_ring(path).spans
    assert len(spans) == 511
    assert (np.diff(spans["number"].astype(np.int64)) == 1).all()
    assert (spans["end_ns"][:-1] >= spans["start_ns"][:-1]).all()
    assert (np.diff(spans["start_ns"].astype(np.int64)) >= 0).all()


@pytest.mark.slow
def test_a_span_costs_less_than_5_us(tmp_path: Path) -> None:
    """About 0.9 µs on an idle core; the limit allows for a busy one."""
    ring = Ring(tmp_path / "r")
    name = ring.name("x")
    best = min(_seconds(ring, name) for _ in range(20))
    assert best / 1000 < 5e-6
    ring.close()


def _seconds(ring: Ring, name: int) -> float:
    start = time.perf_counter()
    for _ in range(1000):
        ring.end(ring.begin(name, Kind.MODULE))
    return time.perf_counter() - start


def test_foreign_and_truncated_files_are_refused(tmp_path: Path) -> None:
    """The message distinguishes the two."""
    path = tmp_path / "r"
    path.write_bytes(b"{}" * 4000)
    with pytest.raises(FormatError, match="is not a ring file"):
        read_ring(path)
    Ring(path).close()
    path.write_bytes(path.read_bytes()[:300_000])
    with pytest.raises(FormatError, match="is truncated"):
        read_ring(path)


def test_a_ring_on_a_full_disk_fails_at_creation(tmp_path: Path) -> None:
    """Space is reserved at the start, so a full disk is not a crash later."""
    code = (
        "import resource, signal, sys; from ms_profile.log.ring import Ring; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)); Ring(sys.argv[1])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert f"{RecordError.__name__}: {tmp_path / 'r'} needs" in run.stderr

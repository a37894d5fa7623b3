"""`ms-profile serve`: bounded series, an index next to the log, and a page that is only local."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import needs_browser, open_tab
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_profile import EventLog, read_events
from ms_profile.cli import main
from ms_profile.live.series import CAPACITY, INDEX, RunIndex, Series
from ms_profile.live.server import LiveRuns, _Server, describe, rank_timeline
from ms_profile.log import event_reader
from ms_profile.log.manifest import ring_path
from ms_profile.log.ring import Kind, Ring

DARKEST = """(() => {
  const canvas = document.querySelector('canvas.chart');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let darkest = 255;
  for (let i = 0; i < pixels.length; i += 4) {
    if (pixels[i + 3] > 200) darkest = Math.min(darkest, pixels[i]);
  }
  return darkest;
})()"""
"""Smallest red value of the first chart's opaque pixels; its line is blue."""

FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
SEARCH = """(() => {
  const box = document.querySelector('input');
  box.value = 'oth';
  box.dispatchEvent(new Event('input'));
})()"""


def log_steps(folder: Path, steps: int, *, rank: int = 0, first: int = 0) -> None:
    """Write step events of a run."""
    with EventLog(folder / "events", rank=rank) as log:
        for step in range(first, first + steps):
            fields: dict[str, Any] = {"step": step, "loss": 1.0 / (step + 1), "step_time_s": 0.01}
            log("step", fields | ({"memory_bytes": 1 << 30} if step % 7 == 0 else {}))


@contextmanager
def served(folder: Path) -> Iterator[http.client.HTTPConnection]:
    """Serve a folder in a thread; yield a connection to it."""
    server = _Server(("127.0.0.1", 0), LiveRuns(folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    try:
        yield connection
    finally:
        connection.close()
        server.shutdown()
        server.server_close()
        thread.join()


def get(connection: http.client.HTTPConnection, path: str, **headers: str) -> tuple[int, Any]:
    """Return the status and the decoded JSON, or the text."""
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    is_json = answer.getheader("Content-Type") == "application/json"
    return answer.status, json.loads(content) if is_json else content.decode()


@settings(max_examples=25)
@given(st.lists(st.lists(st.floats(width=32), min_size=1, max_size=3000), max_size=8))
def test_buckets_keep_the_extremes_the_sum_and_the_order(batches: list[list[float]]) -> None:
    """Points appended in any batches give the same series as all points at once."""
    series, values = Series(), [value for batch in batches for value in batch]
    points = 0
    for batch in batches:
        steps = np.arange(points, points + len(batch), dtype=float)
        series.append(steps, steps, np.array(batch))
        points += len(batch)
    assert series.points == points
    for buckets in (10, CAPACITY):
        step, _, low, high, total, count = series.reduced(buckets)
        assert len(step) <= buckets
        finite = [value for value in values if np.isfinite(value)]
        assert count.sum() == len(finite)
        if finite:
            assert (np.nanmin(low), np.nanmax(high)) == (min(finite), max(finite))
            assert total.sum() == pytest.approx(sum(finite), rel=1e-6, abs=1e30)
        assert (np.diff(step) > 0).all()


def test_memory_does_not_grow_with_the_run() -> None:
    """A million points take 2,048 buckets."""
    series = Series()
    for start in range(0, 1_000_000, 50_000):
        steps = np.arange(start, start + 50_000, dtype=float)
        series.append(steps, steps, steps)
    assert series.rows.shape[1] == CAPACITY
    assert series.width == 512
    assert series.reduced(100)[0, 0] == 0


def test_a_run_is_read_once_and_its_index_continues(tmp_path: Path) -> None:
    """The values match the entire log; fields that only some events have are not lost."""
    log_steps(tmp_path, 3000)
    index = RunIndex(tmp_path)
    while index.update():
        pass
    index.save()
    assert (tmp_path / "events" / INDEX).is_file()
    log_steps(tmp_path, 500, first=3000)
    restored = RunIndex(tmp_path)
    assert restored.events == 3000  # before any event is read
    while restored.update():
        pass
    assert restored.events == 3500
    losses = [event.fields["loss"] for event in read_events(tmp_path) if event.kind == "step"]
    loss = restored.series[0, "step", "loss"]
    _, _, low, high, total, count = loss.reduced(CAPACITY)
    assert (low.min(), high.max(), int(count.sum())) == (min(losses), max(losses), 3500)
    assert total.sum() == pytest.approx(sum(losses))  # type: ignore[arg-type]
    assert loss.last == (3499.0, losses[-1])
    assert restored.series[0, "step", "memory_bytes"].points == 500


def test_a_damaged_index_or_one_of_another_run_is_ignored(tmp_path: Path) -> None:
    """The log is read again."""
    log_steps(tmp_path, 50)
    index = RunIndex(tmp_path)
    index.update()
    index.save()
    path = tmp_path / "events" / INDEX
    saved = path.read_bytes()
    flipped = saved[:300] + bytes([saved[300] ^ 1]) + saved[301:]
    for content in (b"", saved[:100], b"\xff" * 200, flipped):
        path.write_bytes(content)
        assert RunIndex(tmp_path).events == 0
    path.write_bytes(saved)
    (log,) = (tmp_path / "events").glob("*.events")
    os.truncate(log, log.stat().st_size // 2)
    assert RunIndex(tmp_path).events == 0


def test_a_long_log_is_shown_by_a_sample_before_it_is_read(tmp_path: Path) -> None:
    """The sample covers the first and the last steps until the entire log has been read."""
    log_steps(tmp_path, 40_000)
    index = RunIndex(tmp_path)
    assert index.update(0.0)
    preview = index.preview()
    assert preview is not None
    step = preview.series[0, "step", "loss"].reduced(CAPACITY)[0]
    assert (step[0], step[-1] > 30_000) == (0.0, True)
    while index.update():
        pass
    assert index.preview() is None


def test_following_a_log_reads_it_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are larger than one read, torn tails and damage included."""
    log_steps(tmp_path, 4000)
    (path,) = (tmp_path / "events").glob("*.events")
    content = path.read_bytes()
    everything = [event.step for event in read_events(tmp_path)]
    monkeypatch.setattr(event_reader, "READ_BYTES", 500)
    state = event_reader.ReadState()
    path.write_bytes(content[:-7])
    events = event_reader._new_events(path, state)
    path.write_bytes(content)
    events += event_reader._new_events(path, state)
    assert [event.step for event in events] == everything
    path.write_bytes(b"x" * 3000 + content)
    state = event_reader.ReadState()
    assert [event.step for event in event_reader._new_events(path, state)] == everything


def test_events_of_json_lines_are_followed(tmp_path: Path) -> None:
    """As the trainers of ms-align write them; an incomplete line waits."""
    lines = [json.dumps({"time_s": 1e9 + n, "kind": "rollout", "rollout": n, "reward": n / 4})
             for n in range(4)]  # fmt: skip
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines[:3]) + "\nnot an event\n" + lines[3][:20])
    index = RunIndex(tmp_path)
    index.update()
    assert index.series[0, "rollout", "reward"].last == (2.0, 0.5)
    path.write_text("\n".join([*lines[:3], "not an event", lines[3]]) + "\n")
    index.update()
    assert index.series[0, "rollout", "reward"].last == (3.0, 0.75)


def test_a_new_event_is_on_the_page_within_a_second(tmp_path: Path) -> None:
    """The log flushes every half second, and each poll reads the flushed events."""
    assert EventLog.__init__.__kwdefaults__["flush_interval_s"] <= 0.5
    with EventLog(tmp_path, rank=0) as log, served(tmp_path) as connection:
        log("step", {"step": 1, "loss": 2.0})
        log.flush()
        _, run = get(connection, "/api/run?name=.")
        assert run["series"][0]["last"] == [1.0, 2.0]
        _, same = get(connection, f"/api/run?name=.&events={run['events']}")
        assert "series" not in same
        log("step", {"step": 2, "loss": 1.5})
        log.flush()
        _, run = get(connection, f"/api/run?name=.&events={run['events']}")
        assert run["series"][0]["last"] == [2.0, 1.5]


def test_only_loopback_hosts_and_listed_runs_are_answered(tmp_path: Path) -> None:
    """No DNS rebinding, no path outside of the folder, no link, no other method."""
    outside = tmp_path / "outside"
    log_steps(outside, 3)
    folder = tmp_path / "runs"
    log_steps(folder / "one", 3)
    (folder / "linked").symlink_to(outside)
    (folder / "two").mkdir()
    (folder / "two" / "events.jsonl").symlink_to(next((outside / "events").iterdir()))
    with served(folder) as connection:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "",
                     "10.0.0.1", "evil.example:8642"):  # fmt: skip
            assert get(connection, "/", Host=host)[0] == 403, host
            assert get(connection, "/api/runs", Host=host)[0] == 403, host
        for host in ("localhost:8642", "127.0.0.1", "[::1]:8642"):
            assert get(connection, "/", Host=host)[0] == 200, host
        _, listing = get(connection, "/api/runs")
        assert {run["name"] for run in listing["runs"]} <= {"one", "two"}
        assert get(connection, "/api/run?name=two")[1].get("series", []) == []
        for name in ("../outside", "linked", "%2e%2e/outside", str(outside), "one/../../outside",
                     "one%00", ""):  # fmt: skip
            assert get(connection, f"/api/run?name={name}")[0] == 404, name
        for path in ("/../outside/events", "/etc/passwd", "/api", "/api/timeline"):
            assert get(connection, path)[0] == 404, path
        connection.request("POST", "/api/run?name=one", body=b"x")
        assert connection.getresponse().status == 501


def test_a_hundred_runs_are_listed_and_can_be_opened(tmp_path: Path) -> None:
    """The eight most recently opened runs stay in memory."""
    for number in range(100):
        log_steps(tmp_path / f"sweep/run-{number:03d}", 2)
    runs = LiveRuns(tmp_path)
    assert len(runs.entries()) == 100
    for entry in runs.entries()[:20]:
        opened = runs.open(entry.name)
        assert opened is not None
        assert len(describe(opened[0], points=10, known_events=-1)["series"]) == 3
    assert len(runs._open) == 8


def test_ranks_show_the_last_seconds_of_their_rings(tmp_path: Path) -> None:
    """The timeline has the kinds of span that the page draws."""
    time_ns = time.monotonic_ns()
    for rank in range(2):
        ring = Ring(ring_path(tmp_path, rank), rank=rank)
        for start_s in (-60, -3, -1):
            start = time_ns + start_s * 10**9
            ring.record(ring.name("loader"), Kind.DATA, start, start + 10**8)
        ring.close()
    lanes = rank_timeline(tmp_path)
    assert [lane["rank"] for lane in lanes] == [0, 1]
    assert [span[2:] for span in lanes[0]["spans"]] == [["data", "loader"]] * 2


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    """The server prints its address and saves the index when it ends; bad input gives one line."""
    log_steps(tmp_path, 5)
    process = subprocess.Popen(
        # Background jobs of a shell ignore the signal, and so would their children.
        ["env", "--default-signal=INT", sys.executable, "-m", "ms_profile", "serve", str(tmp_path),
         "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    host = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=20)
    assert get(connection, "/api/run?name=.")[1]["events"] == 5
    connection.close()
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
        process.stdout.close()
    assert (tmp_path / "events" / INDEX).is_file()


@pytest.mark.parametrize("options", [["nowhere"], [".", "--port", "70000"]])
def test_bad_input_gives_one_line(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """A folder that does not exist, or an impossible port."""
    assert main(["serve", *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@needs_browser
def test_the_page_follows_a_run_in_a_browser(tmp_path: Path) -> None:
    """At two widths: search, charts, samples as text, a new event, and no horizontal scrolling."""
    folder = tmp_path / "runs"
    for name in ("one", "other"):
        log_steps(folder / name, 200)
    with EventLog(folder / "one" / "events", rank=0) as log:
        log("sample", {"prompt": "<b>2 + 2?</b>", "response": "4", "reward": 1.0})
        log("generate", {"seconds": 1.5, "generator": 0})
        log.flush()
        with served(folder) as connection, open_tab(tmp_path) as tab:
            address = f"http://127.0.0.1:{connection.port}/"
            for width in (1400, 420):
                tab.visit(address, width=width)
                assert tab.evaluate("document.querySelectorAll('tbody tr').length") == 2
                tab.evaluate(SEARCH)
                tab.wait_for("document.querySelectorAll('tbody tr').length === 1")
                tab.visit(f"{address}?run=one", width=width)
                assert tab.evaluate("innerWidth") == width
                assert tab.evaluate(FITS)
                text = tab.evaluate("document.getElementById('panels').innerText")
                assert "<b>2 + 2?</b>" in text
                assert "Loss" in text
                assert tab.evaluate("document.querySelectorAll('canvas').length") >= 4
                assert tab.evaluate(DARKEST) < 100, "the first chart is empty"
            assert "199\nlast step" in text
            log("step", {"step": 200, "loss": 0.001})
            log.flush()
            tab.wait_for("document.getElementById('panels').innerText.includes('200\\nlast step')")

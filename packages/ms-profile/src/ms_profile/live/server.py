"""HTTP server of the live page: a list of runs, and the data of one run as JSON.

The server listens on loopback and answers only requests whose Host header names loopback, so a page
of another site cannot read it through DNS rebinding. A request names a run of the list; no path
from a request reaches the file system.
"""

import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec
import numpy as np
from attrs import frozen

from ms_profile.errors import FormatError, ServeError
from ms_profile.live.series import EventSummary, RunIndex
from ms_profile.log.event_log import SUFFIX
from ms_profile.log.json_lines import NAME
from ms_profile.log.ring import Kind, read_ring
from ms_profile.report.page import render
from ms_profile.version import __version__

logger = logging.getLogger(__name__)
SCRIPTS: Final = ("data.js", "format.js", "tables.js", "live.js")
LOOPBACK: Final = re.compile(r"(127(\.\d{1,3}){3}|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
MAX_RUNS: Final = 2000
MAX_DEPTH: Final = 4
MAX_OPEN: Final = 8
"""Maximum number of runs in memory; the least recently viewed run is dropped."""
MAX_CONNECTIONS: Final = 32
MAX_POINTS: Final = 1000
LIST_INTERVAL_S: Final = 2.0
ACTIVE_S: Final = 30.0
RING_S: Final = 10.0
MAX_RANKS: Final = 16
MAX_RING_SPANS: Final = 400
RING_KINDS: Final = {
    Kind.FORWARD: "compute", Kind.BACKWARD: "compute", Kind.OPTIMIZER: "copy",
    Kind.COLLECTIVE: "collective", Kind.DATA: "data", Kind.GARBAGE: "garbage",
    Kind.BETWEEN: "host",
}  # fmt: skip
"""Color of a span in the rank timeline."""


@frozen(kw_only=True)
class RunEntry:
    """A run in the list."""

    name: str
    """Path relative to the served folder; "." for the folder itself."""
    updated_s: float
    """Time of the last change to the run's logs, in seconds since 1970."""
    size_bytes: int
    active: bool
    """Whether its logs changed in the last 30 seconds."""


class LiveRuns:
    """Runs in a folder; thread-safe.

    Args:
        folder: folder of a run, or a folder of runs.

    Raises:
        ServeError: the folder does not exist.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ServeError(f"{folder} must be a folder with runs; start a run that logs there")
        self.folder = folder
        self._lock = threading.Lock()
        self._open: OrderedDict[str, tuple[RunIndex, threading.Lock]] = OrderedDict()
        self._entries: list[RunEntry] = []
        self._listed_s = -LIST_INTERVAL_S

    def entries(self) -> list[RunEntry]:
        """Return all runs, most recently changed first; scans the folder every two seconds."""
        with self._lock:
            if time.monotonic() - self._listed_s >= LIST_INTERVAL_S:
                self._entries = sorted(_find_runs(self.folder), key=lambda run: -run.updated_s)
                self._listed_s = time.monotonic()
            return self._entries

    def open(self, name: str) -> tuple[RunIndex, threading.Lock] | None:
        """Return the index of a run and its lock; None if the list has no such name."""
        if name not in {entry.name for entry in self.entries()}:
            return None
        with self._lock:
            if name not in self._open:
                self._open[name] = (RunIndex(self.folder / name), threading.Lock())
                while len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            return self._open[name]

    def close(self) -> None:
        """Save the indexes of the open runs next to their logs."""
        for index, lock in list(self._open.values()):
            with lock:
                index.save()


def _find_runs(root: Path) -> list[RunEntry]:
    runs: list[RunEntry] = []
    for path, folders, _ in os.walk(root):  # links are not followed
        depth = len(Path(path).relative_to(root).parts)
        entry = _entry(root, Path(path))
        if entry is not None:
            runs.append(entry)
            folders.clear()
        if depth >= MAX_DEPTH or len(runs) >= MAX_RUNS:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))[:MAX_RUNS]
    return runs


def _entry(root: Path, folder: Path) -> RunEntry | None:
    changed, size = 0.0, 0
    for log_folder in (folder, folder / "events"):
        try:
            with os.scandir(log_folder) as items:
                for item in items:
                    if item.name == NAME or item.name.endswith(SUFFIX):
                        stat = item.stat(follow_symlinks=False)
                        changed, size = max(changed, stat.st_mtime), size + stat.st_size
        except OSError:  # no such folder, or not readable
            continue
    if not size:
        return None
    return RunEntry(
        name=str(folder.relative_to(root)), updated_s=changed, size_bytes=size,
        active=time.time() - changed < ACTIVE_S,
    )  # fmt: skip


def describe(index: RunIndex, *, points: int, known_events: int) -> dict[str, Any]:
    """Return a run's data for the page, or only the number of events if it has not changed.

    Args:
        index: index of the run; updated first.
        points: maximum number of buckets per series.
        known_events: number of events that the page already shows; -1 if it shows none.
    """
    has_more = index.update()
    if index.events == known_events and not has_more:
        return {"events": known_events, "now_s": time.time()}
    preview = index.preview() if has_more else None
    summary: EventSummary = index if preview is None else preview
    return {
        "now_s": time.time(),
        "events": index.events,
        "progress": index.progress if has_more else 1.0,
        "preview": preview is not None,
        "last_wall_s": summary.last_wall_s,
        "omitted_series": summary.omitted_series,
        "series": [
            {"rank": rank, "kind": kind, "field": field, "points": series.points,
             "last": series.last,
             **_rows(series.reduced(points))}
            for (rank, kind, field), series in sorted(summary.series.items())
        ],
        "status": {name: {"wall_s": event.wall_ns / 1e9, "fields": event.fields}
                   for name, event in index.status.items()},
        "samples": [{"wall_s": event.wall_ns / 1e9, "fields": event.fields}
                    for event in reversed(summary.samples)],
        "lanes": [{"rank": rank, "name": lane, "spans": list(spans)[-100:]}
                  for (rank, lane), spans in sorted(index.spans.items())],
    }  # fmt: skip


def _rows(rows: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    step, _, low, high, total, count = rows
    # Buckets without a finite value have NaN, which the encoder writes as null.
    mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return {"step": step.tolist(), "low": low.tolist(), "high": high.tolist(),
            "mean": mean.tolist()}  # fmt: skip


def rank_timeline(folder: Path) -> list[dict[str, Any]]:
    """Return the last ten seconds of each rank's ring, as [start s ago, seconds, color, name]."""
    lanes = []
    for path in sorted([*folder.glob("ring/rank-*.ring"), *folder.glob("rank-*.ring")])[:MAX_RANKS]:
        if path.is_symlink():
            continue
        try:
            recording = read_ring(path)
        except (FormatError, OSError):
            continue
        spans = recording.spans[np.isin(recording.spans["kind"], [int(k) for k in RING_KINDS])]
        start = spans["start_ns"].astype(np.int64) + recording.clock.offset_ns
        end = spans["end_ns"].astype(np.int64) + recording.clock.offset_ns
        newest = max(int(start.max(initial=0)), int(end.max(initial=0)))
        end = np.where(spans["end_ns"] == 0, newest, end)
        rows = np.flatnonzero(end > newest - int(RING_S * 1e9))[-MAX_RING_SPANS:]
        lanes.append({
            "rank": recording.rank, "newest_s": newest / 1e9,
            "spans": [
                [(int(start[row]) - newest) / 1e9, (int(end[row]) - int(start[row])) / 1e9,
                 RING_KINDS[Kind(int(spans["kind"][row]))],
                 recording.name_of(int(spans["name"][row]))[:80]]
                for row in rows
            ],
        })  # fmt: skip
    return lanes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], runs: LiveRuns) -> None:
        self.runs = runs
        self.slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        page = {"title": f"Runs in {runs.folder.absolute().name}", "columns": [],
                "version": __version__}  # fmt: skip
        self.page = render(page, "", SCRIPTS, connect=True).encode()
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request (usually a connection that the browser closed) and keep serving."""
        logger.debug("a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0
    protocol_version = "HTTP/1.1"
    server_version = "ms-profile"
    sys_version = ""

    def handle_one_request(self) -> None:
        """Answer one request; beyond 32 connections, close the new one."""
        if not self.server.slots.acquire(blocking=False):
            self.close_connection = True
            return
        try:
            super().handle_one_request()
        finally:
            self.server.slots.release()

    def do_GET(self) -> None:
        """Send the page or its data."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not LOOPBACK.fullmatch(hosts[0].strip()):
            self._send(403, "text/plain", b"the Host header must name this machine's loopback\n")
            return
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        route: Callable[[dict[str, str]], Any] | None = {
            "/api/runs": self._runs, "/api/run": self._run, "/api/timeline": self._timeline
        }.get(parts.path)  # fmt: skip
        if parts.path == "/":
            self._send(200, "text/html; charset=utf-8", self.server.page)
            return
        try:
            answer = route(query) if route is not None else None
        except (FormatError, OSError) as error:
            self._json(500, {"error": str(error)})
            return
        if answer is None:
            self._json(404, {"error": "unknown run or page"})
        else:
            self._json(200, answer)

    def _runs(self, query: dict[str, str]) -> Any:
        runs = self.server.runs
        return {"folder": str(runs.folder.absolute()), "now_s": time.time(),
                "runs": runs.entries()}  # fmt: skip

    def _run(self, query: dict[str, str]) -> Any:
        opened = self.server.runs.open(query.get("name", ""))
        if opened is None:
            return None
        index, lock = opened
        points = min(max(_integer(query.get("points"), 300), 10), MAX_POINTS)
        with lock:
            return describe(index, points=points, known_events=_integer(query.get("events"), -1))

    def _timeline(self, query: dict[str, str]) -> Any:
        opened = self.server.runs.open(query.get("name", ""))
        return None if opened is None else {"ranks": rank_timeline(opened[0].folder)}

    def _json(self, status: int, content: Any) -> None:
        self._send(status, "application/json", msgspec.json.encode(content))

    def _send(self, status: int, content_type: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log requests at the debug level instead of printing them."""
        logger.debug(format, *args)


def _integer(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 16 else default


def serve(
    folder: Path | str, *, port: int = 0, on_ready: Callable[[str], None] = logger.info
) -> None:
    """Serve the live page of a folder's runs on loopback until interrupted.

    Args:
        folder: folder of a run, or a folder of runs.
        port: TCP port; 0 for any free one.
        on_ready: called with the page's address.

    Raises:
        ServeError: the folder does not exist, or the port is in use.
    """
    runs = LiveRuns(Path(folder))
    if not 0 <= port <= 65535:
        raise ServeError(f"port must be 0 to 65535, got {port}; 0 takes any free port")
    try:
        server = _Server(("127.0.0.1", port), runs)
    except OSError as error:
        raise ServeError(f"cannot listen on port {port}: {error}; set another --port") from error
    try:
        on_ready(f"http://127.0.0.1:{server.server_address[1]}/")
        server.serve_forever(poll_interval=0.1)
    finally:
        server.server_close()
        runs.close()

"""`Tracker`: send events to destinations in background threads, without blocking the training.

The training's thread puts an event into a bounded queue and continues. One thread per destination
opens the run at the first event and writes queued events in batches. Exceptions of a destination
are logged once and counted; a full queue drops new events. If a server is unavailable, slow or out
of space, only its plots are lost.
"""

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from ms_profile.errors import TrackerError, number_in_environment
from ms_profile.secret_text import without_secret, without_secrets
from ms_profile.trackers.destination import Destination, OpenRun, Outcome, Point, RunStart, Value
from ms_profile.trackers.events import OnEvent, point_of
from ms_profile.trackers.system import SystemMeter

logger = logging.getLogger(__name__)
MAX_QUEUED = 10_000
"""Queue capacity per destination, in events; more are dropped and counted."""
MAX_BATCH = 1000
"""Maximum number of events per write."""
RETRY_S = 30.0
"""Seconds between attempts to open a run."""


class Tracker:
    """Send a run's events to destinations: `Tracker(TensorBoard("tb"), MLflow("mlflow"))`.

    Can be passed to the `on_event=` of every trainer, or called in your own loop:
    `tracker("step", {"step": 1, "loss": 2.3})`. Numbers of events with a step become the plot
    `kind/field`, and texts become text; fields of events without a step are settings. Only the
    events of rank 0 (`RANK` in the environment) are sent, and runs are opened at the first event,
    so every process may create a tracker.

    If a destination fails, one warning is logged, the training continues, and `lost` counts the
    events it did not receive. A run ends as "finished" when the block ends, as "stopped" if the
    trainer's `end` event says so, and as "failed" if an exception leaves the block or the process
    exits without `close`. A training resumed from a checkpoint continues the same run.

    Args:
        destinations: `TensorBoard`, `Wandb`, `MLflow`, or any `Destination`.
        name: name of the run. None: the destination chooses one.
        settings: settings to show with the run, such as those of its run file; secrets are masked.
        also: callables that receive every event synchronously, and may raise: an `EventLog`, or a
            `JsonLines` to replace the one that `on_event=` turns off.
        system_interval_s: seconds between points with the process's memory and CPU usage. None:
            no points. Destinations that measure these themselves get none.
        close_timeout_s: seconds that closing waits for pending events.
        waits: wait for space in a slow destination's queue instead of dropping events; not for use
            in training. After `close_timeout_s` without progress, events are dropped and counted.

    Raises:
        TrackerError: no destination is passed, a library is missing, or the name would lead out of
            a destination's folder.
    """

    def __init__(
        self,
        *destinations: Destination,
        name: str | None = None,
        settings: Mapping[str, Value] | None = None,
        also: Sequence[OnEvent] = (),
        system_interval_s: float | None = 15.0,
        close_timeout_s: float = 60.0,
        waits: bool = False,
    ) -> None:
        if not destinations:
            raise TrackerError("a tracker needs a destination: TensorBoard, Wandb or MLflow")
        for destination in destinations:
            destination.check()
        if name is not None:
            _check_name(name)
        masked = {
            key: without_secret(key, value) if isinstance(value, str) else value
            for key, value in (settings or {}).items()
        }
        start = RunStart(name=name, settings=masked, step=None)
        self._active = number_in_environment("RANK", 0) == 0
        self._also, self._pid, self._timeout_s = tuple(also), os.getpid(), close_timeout_s
        self._outcome: Outcome | None = None
        self._closed = False
        wait_s = close_timeout_s if waits else 0.0
        self._feeds = [
            _Feed(destination, start, system_interval_s, wait_s) for destination in destinations
        ]
        atexit.register(self.close, _at_exit=True)

    def __call__(self, kind: str, fields: Mapping[str, Value], /) -> None:
        """Queue one event and return immediately."""
        for callback in self._also:
            callback(kind, fields)
        self.queue_event(kind, fields, wall_s=time.time())

    def queue_event(self, kind: str, fields: Mapping[str, Value], *, wall_s: float) -> None:
        """Queue an event of an earlier time, for the destinations only.

        Args:
            kind: kind of the event.
            fields: fields of the event.
            wall_s: Unix time of the event.
        """
        # A forked child has the queue but not the threads that empty it.
        if self._closed or not self._active or os.getpid() != self._pid:
            return
        if kind == "end":
            self._outcome = "finished" if fields.get("finished", 1) else "stopped"
        point = point_of(kind, fields, wall_s=wall_s)
        for feed in self._feeds:
            feed.put(point)

    @property
    def lost(self) -> int:
        """Number of events that destinations did not receive, summed over destinations."""
        return sum(feed.lost for feed in self._feeds)

    def close(self, outcome: Outcome | None = None, *, _at_exit: bool = False) -> None:
        """Write queued events and end the runs; later calls do nothing.

        Args:
            outcome: end of the runs. None: according to the `end` event, else "finished".
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        final_outcome = outcome or self._outcome or ("failed" if _at_exit else "finished")
        for feed in self._feeds:
            feed.end(final_outcome)
        # One deadline for all: every destination is asked to end before the first wait.
        deadline = time.monotonic() + self._timeout_s
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        self.close("failed" if error_type is not None else None)


class _Feed:
    """Queue, thread and run of one destination."""

    def __init__(
        self,
        destination: Destination,
        start: RunStart,
        system_interval_s: float | None,
        wait_s: float,
    ) -> None:
        self._wait_s = wait_s
        self.destination, self.start, self.lost = destination, start, 0
        self._queue: queue.Queue[Point | None] = queue.Queue(MAX_QUEUED)
        self._outcome: Outcome | None = None
        self._run: OpenRun | None = None
        self._warned = False
        self._stuck = False
        self._tried_s = -RETRY_S
        self._step: int | None = None
        meter_interval_s = None if destination.measures_system else system_interval_s
        self._meter = SystemMeter(meter_interval_s)
        self._thread: threading.Thread | None = None

    def put(self, point: Point) -> None:
        """Queue a point; wait up to `wait_s` for space, but only once while the queue is stuck."""
        if self._thread is None:
            name = f"ms-profile-{self.destination.title}"
            self._thread = threading.Thread(target=self._work, daemon=True, name=name)
            self._thread.start()
        try:
            self._queue.put(point, block=self._wait_s > 0 and not self._stuck, timeout=self._wait_s)
            self._stuck = False
        except queue.Full:
            self._stuck = True
            self.lost += 1
            self._warn("its queue is full")

    def end(self, outcome: Outcome) -> None:
        """Request the end of the run once queued events are written; does not wait."""
        self._outcome = outcome
        if self._thread is not None and self._queue.empty():
            self._queue.put_nowait(None)  # wakes an idle thread; a busy one checks anyway

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to finish."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.lost += self._queue.qsize()
                self._warn(f"it was still writing after {timeout_s:.0f} s")

    def _work(self) -> None:
        while True:
            try:
                batch = [self._queue.get(timeout=self._meter.rest_s)]
            except queue.Empty:
                batch = []
            # This thread is the only consumer, so a queue that is not empty stays so until the get.
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            points = [point for point in batch if point is not None]
            self._step = max(
                (point.step for point in points if point.step is not None), default=self._step
            )
            points += self._meter.read(self._step)
            self._write(points)
            if self._outcome is not None and self._queue.empty():
                return self._close(self._outcome)

    def _write(self, points: list[Point]) -> None:
        if not points or not self._ensure_open(points):
            self.lost += len(points)
            return
        try:
            if self._run is not None:
                self._run.write(points)
        except Exception as error:  # exceptions of a tracker must not reach the training
            self.lost += len(points)
            self._warn(_line(error))

    def _ensure_open(self, points: list[Point]) -> bool:
        if self._run is None and time.monotonic() - self._tried_s >= RETRY_S:
            self._tried_s = time.monotonic()
            first = next((point for point in points if point.step is not None), None)
            step = None if first is None else first.step
            if first is not None and step is not None and first.kind == "resume":
                # A `resume` names the last step before it; the next one is the first that is new.
                step += 1
            start = RunStart(name=self.start.name, settings=self.start.settings, step=step)
            try:
                self._run = self.destination.open(start)
            except Exception as error:
                self._warn(_line(error))
        return self._run is not None

    def _close(self, outcome: Outcome) -> None:
        try:
            if self._run is not None:
                self._run.close(outcome)
        except Exception as error:
            self._warn(_line(error))

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s does not accept events: %s; the training continues",
                self.destination.title,
                problem,
            )


def _check_name(name: str) -> None:
    """Check a run's name, which may become a folder below a destination's folder."""
    parts = PurePath(name).parts
    if not parts or "/" in parts or ".." in parts or not name.isprintable() or len(name) > 200:
        raise TrackerError(
            f"name must be a path inside the destination's folder, got {name[:60]!r}; use a name "
            "such as `first` or `sweep/first`"
        )


def _line(error: Exception) -> str:
    # Secrets are masked before truncation: a server address may contain a password.
    return f"{type(error).__name__}: {without_secrets(' '.join(str(error).split()))[:300]}"

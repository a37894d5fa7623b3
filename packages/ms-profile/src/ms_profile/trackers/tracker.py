"""`Tracker`: hands events to trackers in threads of their own, so that none holds up a training.

The training's thread puts an event into a bounded queue and goes on. One thread a destination
opens the run at the first event, takes what has come together, and writes it. What a destination
raises is logged once and counted; a full queue drops what is new. So a server that is away, slow
or full costs its curves and nothing else.
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
MOST_WAITING = 10_000
"""Events that wait for a destination; more are dropped and counted."""
A_WRITE = 1000
"""Most events that are written at once."""
RETRY_S = 30.0
"""Seconds between attempts to open a run."""


class Tracker:
    """Shows a run's events elsewhere: `Tracker(TensorBoard("tb"), MLflow("mlflow"))`.

    Fits the `on_event=` of every trainer, and can be called in a loop of your own:
    `tracker("step", {"step": 1, "loss": 2.3})`. A number of an event with a step is the curve
    `kind/field`, a text of it a text; fields of an event without a step are settings. Events of
    other processes than the first (`RANK` in the environment) are left out, and a run is opened
    at the first event, so that each process may make a tracker.

    A destination that fails is warned of once in the log; the training goes on, and `lost` counts
    what it did not take. The run is closed as finished when the block ends, as stopped where the
    trainer's event `end` says so, as failed where an exception ends the block, or where the process
    ends without `close`. A training that goes on from a checkpoint goes on in the same run.

    Args:
        destinations: `TensorBoard`, `Wandb`, `MLflow`, or any `Destination`.
        name: of the run; None leaves it to the destination.
        settings: shown with the run, such as the keys of its run file; secrets are masked.
        also: called with each event at once, in the training's thread, and with its errors: an
            `EventLog`, or a `JsonLines` in place of the one that `on_event=` replaces.
        system_interval_s: seconds between points of the process's memory and processor time;
            None for none. A destination that measures them itself is given none.
        close_timeout_s: how long closing waits for what is not written yet.
        waits: wait for room in the queue of a slow destination instead of dropping events; not for
            a training. A destination that takes nothing for `close_timeout_s` is given up: what
            its queue cannot hold is dropped and counted.

    Raises:
        TrackerError: no destination is given, one of them lacks its library, or the name would
            lead out of a destination's folder.
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
        shown = {
            key: without_secret(key, value) if isinstance(value, str) else value
            for key, value in (settings or {}).items()
        }
        start = RunStart(name=name, settings=shown, step=None)
        self._active = number_in_environment("RANK", 0) == 0
        self._also, self._pid, self._timeout_s = tuple(also), os.getpid(), close_timeout_s
        self._outcome: Outcome | None = None
        self._closed = False
        wait_s = close_timeout_s if waits else 0.0
        self._feeds = [_Feed(each, start, system_interval_s, wait_s) for each in destinations]
        atexit.register(self.close, _at_exit=True)

    def __call__(self, kind: str, fields: Mapping[str, Value], /) -> None:
        """Take one event and return at once, whatever the destinations do with it."""
        for other in self._also:
            other(kind, fields)
        self.take(kind, fields, wall_s=time.time())

    def take(self, kind: str, fields: Mapping[str, Value], *, wall_s: float) -> None:
        """Take an event of an earlier moment, for the destinations alone.

        Args:
            kind: as of any event.
            fields: likewise.
            wall_s: Unix time of it.
        """
        if self._closed or not self._active or os.getpid() != self._pid:
            return
        if kind == "end":
            self._outcome = "finished" if fields.get("finished", 1) else "stopped"
        point = point_of(kind, fields, wall_s=wall_s)
        for feed in self._feeds:
            feed.put(point)

    @property
    def lost(self) -> int:
        """Events that a destination did not take, summed over destinations."""
        return sum(feed.lost for feed in self._feeds)

    def close(self, outcome: Outcome | None = None, *, _at_exit: bool = False) -> None:
        """Write what waits and end the runs; further calls do nothing.

        Args:
            outcome: how the run ended; by default as the event `end` said, else `"finished"`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        ended = outcome or self._outcome or ("failed" if _at_exit else "finished")
        for feed in self._feeds:
            feed.end(ended)
        deadline = time.monotonic() + self._timeout_s
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close("failed" if kind is not None else None)


class _Feed:
    """One destination's queue, thread and run."""

    def __init__(
        self,
        destination: Destination,
        start: RunStart,
        system_interval_s: float | None,
        wait_s: float,
    ) -> None:
        self._wait_s = wait_s
        self.destination, self.start, self.lost = destination, start, 0
        self._queue: queue.Queue[Point | None] = queue.Queue(MOST_WAITING)
        self._outcome: Outcome | None = None
        self._run: OpenRun | None = None
        self._warned = False
        self._stuck = False
        self._tried_s = -RETRY_S
        self._step: int | None = None
        measured = None if destination.measures_system else system_interval_s
        self._meter = SystemMeter(measured)
        self._thread: threading.Thread | None = None

    def put(self, point: Point) -> None:
        """Hand over a point; wait at most `wait_s` for room, and not again while it is stuck."""
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
        """Ask the thread to end the run once it has written what waits; this does not wait."""
        self._outcome = outcome
        if self._thread is not None and self._queue.empty():
            self._queue.put_nowait(None)  # wakes it; one that has points to write is awake

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self.lost += self._queue.qsize()
                self._warn(f"it was still writing after {timeout_s:.0f} s")

    def _work(self) -> None:
        while True:
            try:
                taken = [self._queue.get(timeout=self._meter.rest_s)]
            except queue.Empty:
                taken = []
            while len(taken) < A_WRITE and not self._queue.empty():
                taken.append(self._queue.get_nowait())
            points = [each for each in taken if each is not None]
            self._step = max((p.step for p in points if p.step is not None), default=self._step)
            points += self._meter.read(self._step)
            self._write(points)
            if self._outcome is not None and self._queue.empty():
                return self._close(self._outcome)

    def _write(self, points: list[Point]) -> None:
        if not points or not self._opened(points):
            self.lost += len(points)
            return
        try:
            if self._run is not None:
                self._run.write(points)
        except Exception as error:  # whatever a tracker raises must not reach the training
            self.lost += len(points)
            self._warn(_line(error))

    def _opened(self, points: list[Point]) -> bool:
        if self._run is None and time.monotonic() - self._tried_s >= RETRY_S:
            self._tried_s = time.monotonic()
            first = next((each for each in points if each.step is not None), None)
            step = None if first is None else first.step
            if first is not None and step is not None and first.kind == "resume":
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
                "%s takes no events: %s; the training goes on", self.destination.title, problem
            )


def _check_name(name: str) -> None:
    """Refuse a bad name of a run, which may become a folder below a destination's."""
    parts = PurePath(name).parts
    if not parts or "/" in parts or ".." in parts or not name.isprintable() or len(name) > 200:
        raise TrackerError(
            f"name is {name[:60]!r}; give a run a name such as `first` or `sweep/first`, which"
            " stays in the destination's folder"
        )


def _line(error: Exception) -> str:
    # Masked before it is cut: a server's address may hold a password.
    return f"{type(error).__name__}: {without_secrets(' '.join(str(error).split()))[:300]}"

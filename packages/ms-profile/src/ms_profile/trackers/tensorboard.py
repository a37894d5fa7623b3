"""Write events to TensorBoard files during training, without TensorBoard installed."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import field, frozen

from ms_profile.log.tensorboard_records import file_start, session_start, values
from ms_profile.trackers.destination import OpenRun, Outcome, Point, RunStart, checked_folder


@frozen
class TensorBoard:
    """Files for `tensorboard --logdir FOLDER`, one subfolder per run.

    A resumed training writes a new file, and TensorBoard then hides the values of repeated steps
    in earlier files.
    """

    folder: Path = field(converter=checked_folder)
    """TensorBoard's log folder; a run's files go to `FOLDER/NAME`, or to FOLDER without a name."""

    title = "TensorBoard"
    measures_system = False

    def check(self) -> None:
        """Do nothing, as no library is needed."""

    def open(self, start: RunStart, /) -> OpenRun:
        """Create a file.

        Raises:
            OSError: the folder cannot be written.
        """
        return _File(self.folder / (start.name or ""), start)


class _File:
    """One event file, to which complete records are appended."""

    def __init__(self, folder: Path, start: RunStart) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now_s = time.time()
        name = f"events.out.tfevents.{now_s:.6f}.{socket.gethostname()}.{os.getpid()}.ms-profile"
        # Unbuffered: each record is complete or absent if the process is killed.
        self._file = (folder / name).open("xb", buffering=0)
        self._settings: dict[str, object] = dict(start.settings)
        self._step = start.step or 0
        self._file.write(file_start(now_s) + session_start(now_s, self._step))
        self._write_settings(now_s)

    def write(self, points: Sequence[Point], /) -> None:
        """Append one record per point; settings form one table, rewritten when it grows."""
        previous_count = len(self._settings)
        records = []
        for point in points:
            if point.kind == "resume" and point.step is not None:
                # Hides what was logged after the checkpoint that the training went back to.
                records.append(session_start(point.wall_s, point.step + 1))
            if point.step is None:
                self._settings |= {**point.numbers, **point.texts}
            elif point.numbers or point.texts:
                self._step = max(self._step, point.step)
                records.append(values(point.wall_s, point.step, point.numbers, point.texts))
        # One write per batch: TensorBoard reads while the file grows.
        self._file.write(b"".join(records))
        if len(self._settings) > previous_count:
            self._write_settings(points[-1].wall_s)

    def close(self, outcome: Outcome, /) -> None:
        """Write the outcome and sync the file."""
        self._file.write(values(time.time(), self._step, {}, {"outcome": outcome}))
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_settings(self, wall_s: float) -> None:
        if self._settings:
            rows = [f"| {name} | {value} |" for name, value in sorted(self._settings.items())]
            table = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._file.write(values(wall_s, self._step, {}, {"settings": table}))

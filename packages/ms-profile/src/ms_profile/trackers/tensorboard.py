"""Events as TensorBoard's files, which grow while the training runs; TensorBoard is not needed."""

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
    """Files below a folder for `tensorboard --logdir FOLDER`, a folder a run.

    A training that goes on writes a further file, and TensorBoard then no longer shows what an
    earlier one says of the steps that are done again.
    """

    folder: Path = field(converter=checked_folder)
    """TensorBoard's log folder; the run's files go to `FOLDER/NAME`, or FOLDER without a name."""

    title = "TensorBoard"
    measures_system = False

    def check(self) -> None:
        """Accept every installation: no library is needed."""

    def open(self, start: RunStart, /) -> OpenRun:
        """Begin a file.

        Raises:
            OSError: the folder cannot be written.
        """
        return _File(self.folder / (start.name or ""), start)


class _File:
    """One file, to which whole records are appended."""

    def __init__(self, folder: Path, start: RunStart) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now_s = time.time()
        name = f"events.out.tfevents.{now_s:.6f}.{socket.gethostname()}.{os.getpid()}.ms-profile"
        # Without a buffer: a record is there, or not, when the process is killed.
        self._file = (folder / name).open("xb", buffering=0)
        self._settings: dict[str, object] = dict(start.settings)
        self._step = start.step or 0
        self._file.write(file_start(now_s) + session_start(now_s, self._step))
        self._write_settings(now_s)

    def write(self, points: Sequence[Point], /) -> None:
        """Append a record a point; settings are one table, which is shown anew when it grows."""
        before = len(self._settings)
        records = []
        for point in points:
            if point.kind == "resume" and point.step is not None:
                records.append(session_start(point.wall_s, point.step + 1))
            if point.step is None:
                self._settings |= {**point.numbers, **point.texts}
            elif point.numbers or point.texts:
                self._step = max(self._step, point.step)
                records.append(values(point.wall_s, point.step, point.numbers, point.texts))
        self._file.write(b"".join(records))
        if len(self._settings) > before:
            self._write_settings(points[-1].wall_s)

    def close(self, outcome: Outcome, /) -> None:
        """Say how the run ended, and sync the file."""
        self._file.write(values(time.time(), self._step, {}, {"outcome": outcome}))
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_settings(self, wall_s: float) -> None:
        if self._settings:
            rows = [f"| {name} | {value} |" for name, value in sorted(self._settings.items())]
            table = "\n".join(["| setting | value |", "|---|---|", *rows])
            self._file.write(values(wall_s, self._step, {}, {"settings": table}))

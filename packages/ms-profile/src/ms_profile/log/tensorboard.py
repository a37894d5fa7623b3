"""Export a log's events as TensorBoard files."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from ms_profile.arguments import check_type
from ms_profile.errors import EventError, RecordError
from ms_profile.files.untrusted import check_path
from ms_profile.log.event_log import Event
from ms_profile.log.manifest import atomic_file
from ms_profile.log.tensorboard_records import file_start, values


def export_tensorboard(events: Iterable[Event], folder: Path | str) -> int:
    """Write every number of every event with a step as scalar `kind/field`, one run per rank.

    Args:
        events: events from `read_events`.
        folder: TensorBoard's log folder; files go to its subfolders `rank-00000` and so on, and
            appear once all events are written.

    Returns:
        The number of scalars written.

    Raises:
        RecordError: the path is invalid, or a file exists there.
        OSError: the folder cannot be written.
    """
    check_path("folder", folder, error=RecordError, written="folder")
    check_type("events", events, Iterable, "events of read_events", error=EventError)
    files: dict[int, BinaryIO] = {}
    written = 0
    with ExitStack() as open_files:
        for event in events:
            check_type("each item of events", event, Event, "an Event", error=EventError)
            if event.step is None:
                continue
            if event.rank not in files:
                name = f"events.out.tfevents.{event.wall_ns // 1_000_000_000}.ms-profile"
                path = Path(folder) / f"rank-{event.rank:05d}" / name
                file = files[event.rank] = open_files.enter_context(atomic_file(path))
                file.write(file_start(event.wall_ns / 1e9))
            scalars = {
                f"{event.kind}/{name}": value
                for name, value in event.fields.items()
                if name != "step" and isinstance(value, int | float)
            }
            if scalars:
                files[event.rank].write(values(event.wall_ns / 1e9, event.step, scalars))
                written += len(scalars)
    return written

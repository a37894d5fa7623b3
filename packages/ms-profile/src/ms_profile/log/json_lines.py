"""Read the events of a trainer's `events.jsonl`, once or as the file grows.

A line is `{"time_s":...,"kind":"step","step":7,...}`; null represents a number that is not finite.
"""

import time
from collections.abc import Callable, Iterator
from io import BufferedReader
from math import nan
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
from msgspec import Struct

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import check_path, decoding, open_file
from ms_profile.log.event_log import Event

NAME: Final = "events.jsonl"
MAX_LINE_BYTES: Final = 1 << 20
MAX_TIME_S: Final = 1e10


class _Head(Struct):
    kind: str
    time_s: float


def read_json_lines(
    path: Path | str,
    *,
    follow: bool = False,
    poll_s: float = 0.5,
    on_problem: Callable[[str], object] = lambda problem: None,
) -> Iterator[Event]:
    """Yield the events of a file, in file order.

    Args:
        path: file to read.
        follow: keep reading as the file grows, until an event of kind `end`.
        poll_s: seconds between reads of a file that does not grow.
        on_problem: called with a message about each line that is not an event; it is skipped.

    Raises:
        FormatError: the file does not exist.
    """
    check_path("events", path, error=FormatError)
    with (
        decoding(path, error=FormatError),
        BufferedReader(open_file(path, error=FormatError)) as file,
    ):
        for number, line in enumerate(_lines(file, follow=follow, poll_s=poll_s), 1):
            try:
                event = event_of_line(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                on_problem(f"{path}: line {number} is not an event and was skipped: {error}")
                continue
            yield event
            if follow and event.kind == "end":
                return


def _lines(file: BinaryIO, *, follow: bool, poll_s: float) -> Iterator[bytes]:
    """Yield complete lines; wait for the rest of an incomplete one, or drop it at the end."""
    line = b""
    while True:
        # The line may be incomplete, if it is still being written.
        part = file.readline(MAX_LINE_BYTES)
        line += part
        if line.endswith(b"\n"):
            if line.strip():
                yield line
            line = b""
        elif len(line) > MAX_LINE_BYTES:
            raise FormatError(
                f"{file.name} has a line of over {MAX_LINE_BYTES} bytes; is it events.jsonl?"
            )
        elif not part:
            if not follow:
                return
            time.sleep(poll_s)


def event_of_line(line: bytes) -> Event:
    """Decode one line; raises msgspec's errors, ValueError or RecursionError."""
    head = msgspec.json.decode(line, type=_Head)
    if not 0 <= head.time_s < MAX_TIME_S:
        raise ValueError(f"time_s must be 0 to {MAX_TIME_S:.0f}, got {head.time_s}")
    members: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    fields: dict[str, int | float | str] = {
        name: nan if value is None else value
        for name, value in members.items()
        if name not in ("kind", "time_s")
        and (value is None or isinstance(value, int | float | str))
    }
    step = fields.get("step")
    step_number = step if isinstance(step, int) and not isinstance(step, bool) else None
    # The file has no rank and no monotonic time: both are 0.
    return Event(0, head.kind, step_number, 0, int(head.time_s * 1e9), fields)

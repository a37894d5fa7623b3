"""The events of a trainer's `events.jsonl`, read once or as the file grows.

A line is `{"time_s":...,"kind":"step","step":7,...}`; a number that was not finite is null.
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
LONGEST_LINE_BYTES: Final = 1 << 20
LATEST_S: Final = 1e10


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
    """Yield the events of a file, in its order.

    Args:
        path: the file.
        follow: go on as it grows, up to an event of kind `end`, that of a run that is over.
        poll_s: seconds between looks at a file that does not grow.
        on_problem: called with a line for each line that is no event; it is left out.

    Raises:
        FormatError: there is no such file.
    """
    check_path("events", path, error=FormatError)
    with (
        decoding(path, error=FormatError),
        BufferedReader(open_file(path, error=FormatError)) as file,
    ):
        for number, line in enumerate(_lines(file, follow=follow, poll_s=poll_s), 1):
            try:
                event = _event(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                on_problem(f"{path}: line {number} is no event and was left out: {error}")
                continue
            yield event
            if follow and event.kind == "end":
                return


def _lines(file: BinaryIO, *, follow: bool, poll_s: float) -> Iterator[bytes]:
    """Yield whole lines; one still being written is waited for, or left out at the end."""
    waiting = b""
    while True:
        part = file.readline(LONGEST_LINE_BYTES)
        waiting += part
        if waiting.endswith(b"\n"):
            if waiting.strip():
                yield waiting
            waiting = b""
        elif len(waiting) > LONGEST_LINE_BYTES:
            raise FormatError(
                f"{file.name}: a line of over {LONGEST_LINE_BYTES} bytes; is it events.jsonl?"
            )
        elif not part:
            if not follow:
                return
            time.sleep(poll_s)


def _event(line: bytes) -> Event:
    head = msgspec.json.decode(line, type=_Head)
    if not 0 <= head.time_s < LATEST_S:
        raise ValueError(f"time_s is {head.time_s}")
    found: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
    fields: dict[str, int | float | str] = {
        name: nan if value is None else value
        for name, value in found.items()
        if name not in ("kind", "time_s")
        and (value is None or isinstance(value, int | float | str))
    }
    step = fields.get("step")
    whole = step if isinstance(step, int) and not isinstance(step, bool) else None
    return Event(0, head.kind, whole, 0, int(head.time_s * 1e9), fields)

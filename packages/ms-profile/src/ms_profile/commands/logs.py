"""`ms-profile logs`: merge, filter, follow and export the event logs of all ranks."""

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from msgspec.json import encode

from ms_profile.commands.printable import plain
from ms_profile.entry import folder_argument, path_argument
from ms_profile.errors import EventError
from ms_profile.log.event_log import Event
from ms_profile.log.event_reader import EventFilter, event_files_so_far, follow_events, read_events
from ms_profile.log.tensorboard import export_tensorboard

HELP: Final = "merge the event logs of all ranks by time; filter, follow, export"
EXAMPLE: Final = "ms-profile logs ./profile_results --kind step --rank 0,1 --json"
MAX_AGE_S: Final = 1e10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser.add_argument(
        "folder", type=path_argument, metavar="DIR", help="folder of a run or of an event log"
    )
    parser.add_argument("--kind", metavar="NAMES", help="comma-separated event kinds to show")
    parser.add_argument("--rank", metavar="NUMBERS", help="comma-separated ranks to show")
    parser.add_argument("--first-step", type=int, metavar="N", help="first step to show")
    parser.add_argument("--last-step", type=int, metavar="N", help="last step to show")
    parser.add_argument("--since", type=float, metavar="SECONDS", help="show the last SECONDS only")
    parser.add_argument("--follow", action="store_true", help="keep printing as the logs grow")
    parser.add_argument(
        "--tensorboard", type=folder_argument, metavar="DIR", help="export scalars for TensorBoard"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def execute(options: argparse.Namespace) -> int:
    """Print or export the events.

    Returns:
        1 if damaged parts of a log were skipped, 0 otherwise.
    """
    since = options.since
    if since is not None and not 0 <= since < MAX_AGE_S:
        raise EventError(
            f"--since must be 0 to {MAX_AGE_S:.0f} seconds, got {since}; 60 shows the last minute"
        )
    event_filter = EventFilter(
        kinds=options.kind.split(",") if options.kind else None,
        ranks=_ranks(options.rank) if options.rank else None,
        first_step=options.first_step,
        last_step=options.last_step,
        since_ns=None if since is None else time.time_ns() - int(since * 1e9),
    )
    problems: list[str] = []
    events = _events(options, event_filter, problems)
    if options.tensorboard is not None:
        written = export_tensorboard(events, options.tensorboard)
        if options.json:
            print(encode({"scalars": written, "folder": str(options.tensorboard)}).decode())
        else:
            print(f"{written} scalars written to {options.tensorboard}")
    else:
        for event in events:
            print(_as_json(event) if options.json else _as_text(event), flush=options.follow)
    for problem in problems:
        print(f"ms-profile: {plain(problem)}", file=sys.stderr)
    return 1 if problems else 0


def _ranks(text: str) -> list[int]:
    try:
        return [int(rank) for rank in text.split(",")]
    except ValueError:
        raise EventError(
            f"--rank must be comma-separated numbers, got {text!r}; for example --rank 0,3"
        ) from None


def _events(
    options: argparse.Namespace, event_filter: EventFilter, problems: list[str]
) -> Iterator[Event]:
    if options.follow and options.tensorboard is None:
        if not event_files_so_far(options.folder):
            print(f"ms-profile: waiting for events in {options.folder}", file=sys.stderr)
        return follow_events(options.folder, event_filter)
    return read_events(options.folder, event_filter, on_problem=problems.append)


def _as_json(event: Event) -> str:
    # msgspec writes NaN and infinity, such as the loss of a diverged run, as null.
    return encode(
        {
            "wall_ns": event.wall_ns,
            "monotonic_ns": event.monotonic_ns,
            "rank": event.rank,
            "kind": event.kind,
            "fields": event.fields,
        }
    ).decode()


def _as_text(event: Event) -> str:
    fields = " ".join(f"{plain(name)}={_short(value)}" for name, value in event.fields.items())
    # Any 64-bit timestamp in ns falls into the years 1677 to 2554, which datetime supports.
    moment = datetime.fromtimestamp(event.wall_ns / 1e9, tz=UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S.%fZ} {event.rank:>3} {plain(event.kind):<10} {fields}"


def _short(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else plain(str(value))

"""`ms-profile track`: a run's events shown in TensorBoard, W&B or MLflow, later or meanwhile."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from msgspec.json import encode

from ms_profile.commands.printable import plain
from ms_profile.entry import path_argument
from ms_profile.errors import TrackerError
from ms_profile.files.untrusted import read_toml
from ms_profile.log.event_log import Event
from ms_profile.log.event_reader import EventFilter, event_files_so_far, follow_events, read_events
from ms_profile.log.json_lines import NAME, read_json_lines
from ms_profile.trackers import Destination, MLflow, TensorBoard, Tracker, Wandb

HELP: Final = "show a run's events in TensorBoard, W&B or MLflow, later or as it runs"
EXAMPLE: Final = "ms-profile track runs/sft --to tensorboard=tb --settings RUN.toml --follow"
DESTINATIONS: Final[dict[str, Callable[[str, argparse.Namespace], Destination]]] = {
    "tensorboard": lambda folder, options: TensorBoard(folder),
    "wandb": lambda folder, options: Wandb(folder, project=options.project),
    "mlflow": lambda folder, options: MLflow(folder, experiment=options.project or "ms-training"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "run",
        type=path_argument,
        metavar="RUN",
        help="a trainer's output_dir, its events.jsonl, or the folder of an event log",
    )
    parser.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="NAME=DIR",
        help=f"where to: {', '.join(DESTINATIONS)}, each with a folder of its own; repeat it",
    )
    parser.add_argument("--name", help="of the run; by default that of its folder")
    parser.add_argument("--project", help="W&B's project, MLflow's experiment")
    parser.add_argument(
        "--settings", type=path_argument, metavar="RUN.toml", help="shown with the run"
    )
    parser.add_argument(
        "--follow", action="store_true", help="go on as the events come, to the end of the run"
    )
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")


def execute(options: argparse.Namespace) -> int:
    """Hand over the events; 1 if some were left out."""
    destinations = [_destination(text, options) for text in options.to]
    settings = {} if options.settings is None else flat(_toml(options.settings))
    problems: list[str] = []
    events = 0
    folder = options.run.parent if options.run.is_file() else options.run
    tracker = Tracker(
        *destinations,
        name=options.name or folder.resolve().name,
        settings=settings,
        system_interval_s=None,
        waits=True,
    )
    with tracker:
        for event in _events(options, problems):
            tracker.take(event.kind, event.fields, wall_s=event.wall_ns / 1e9)
            events += 1
    if options.json:
        print(encode({"events": events, "lost": tracker.lost}).decode())
    else:
        print(f"{events} events to {', '.join(options.to)}")
    for problem in problems:
        print(f"ms-profile: {plain(problem)}", file=sys.stderr)
    return 1 if problems or tracker.lost else 0


def flat(settings: dict[str, Any], before: str = "") -> dict[str, int | float | str]:
    """Return the keys of nested tables with dots between them; a list is its text."""
    found: dict[str, int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{name}.")
        else:
            known = isinstance(value, int | float | str)
            found[f"{before}{name}"] = value if known else str(value)
    return found


def _toml(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_toml(path, error=TrackerError)
    return found


def _destination(text: str, options: argparse.Namespace) -> Destination:
    name, _, folder = text.partition("=")
    if name not in DESTINATIONS or not folder:
        raise TrackerError(
            f"--to is {text!r}; give {' or '.join(f'{each}=DIR' for each in DESTINATIONS)}"
        )
    return DESTINATIONS[name](folder, options)


def _events(options: argparse.Namespace, problems: list[str]) -> Iterator[Event]:
    """Return the first rank's events, of whichever kind of log there is."""
    path = options.run / NAME if (options.run / NAME).is_file() else options.run
    if path.is_file():
        return read_json_lines(path, follow=options.follow, on_problem=problems.append)
    if not path.is_dir() or not event_files_so_far(path):
        raise TrackerError(
            f"{options.run}: no {NAME} and no event log is here; give a run's folder"
        )
    first = EventFilter(ranks=[0])
    if options.follow:
        return _to_the_end(follow_events(path, first))
    return read_events(path, first, on_problem=problems.append)


def _to_the_end(events: Iterator[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        if event.kind == "end":
            return

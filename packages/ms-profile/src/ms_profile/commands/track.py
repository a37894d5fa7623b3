"""`ms-profile track`: send a run's events to TensorBoard, W&B or MLflow, live or afterwards."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from msgspec.json import encode

from ms_profile.commands.printable import plain
from ms_profile.entry import CommandParser, path_argument
from ms_profile.errors import TrackerError
from ms_profile.files.untrusted import read_toml
from ms_profile.log.event_log import Event
from ms_profile.log.event_reader import EventFilter, event_files_so_far, follow_events, read_events
from ms_profile.log.json_lines import NAME, read_json_lines
from ms_profile.trackers import Destination, MLflow, TensorBoard, Tracker, Wandb
from ms_profile.used_settings import UsedIf

HELP: Final = "send a run's events to TensorBoard, W&B or MLflow, live or afterwards"
EXAMPLE: Final = "ms-profile track runs/sft --to tensorboard=tb --settings RUN.toml --follow"
DESTINATIONS: Final[dict[str, Callable[[str, argparse.Namespace], Destination]]] = {
    "tensorboard": lambda folder, options: TensorBoard(folder),
    "wandb": lambda folder, options: Wandb(folder, project=options.project),
    "mlflow": lambda folder, options: MLflow(folder, experiment=options.project or "ms-training"),
}


def _has_projects(options: argparse.Namespace) -> bool:
    return any(text.partition("=")[0] in ("wandb", "mlflow") for text in options.to)


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments to the parser."""
    parser.used_if = (UsedIf("project", "with --to wandb=DIR or --to mlflow=DIR", _has_projects),)
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
        help=f"destination: {', '.join(DESTINATIONS)}, each with its own folder; repeatable",
    )
    parser.add_argument("--name", help="name of the run; default: the name of its folder")
    parser.add_argument("--project", help="project in W&B, experiment in MLflow")
    parser.add_argument(
        "--settings", type=path_argument, metavar="RUN.toml", help="settings to show with the run"
    )
    parser.add_argument(
        "--follow", action="store_true", help="keep sending new events until the run ends"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def execute(options: argparse.Namespace) -> int:
    """Send the events to every destination.

    Returns:
        1 if events were skipped or lost, 0 otherwise.
    """
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
            tracker.queue_event(event.kind, event.fields, wall_s=event.wall_ns / 1e9)
            events += 1
    if options.json:
        print(encode({"events": events, "lost": tracker.lost}).decode())
    else:
        print(f"{events} events to {', '.join(options.to)}")
    for problem in problems:
        print(f"ms-profile: {plain(problem)}", file=sys.stderr)
    return 1 if problems or tracker.lost else 0


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, int | float | str]:
    """Flatten nested tables to dotted keys; lists and other values become text."""
    scalars: dict[str, int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            scalars |= flat(value, f"{prefix}{name}.")
        else:
            is_scalar = isinstance(value, int | float | str)
            scalars[f"{prefix}{name}"] = value if is_scalar else str(value)
    return scalars


def _toml(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = read_toml(path, error=TrackerError)
    return settings


def _destination(text: str, options: argparse.Namespace) -> Destination:
    name, _, folder = text.partition("=")
    if name not in DESTINATIONS or not folder:
        raise TrackerError(
            f"--to must be NAME=DIR, got {text!r}; use "
            f"{' or '.join(f'{name}=DIR' for name in DESTINATIONS)}"
        )
    return DESTINATIONS[name](folder, options)


def _events(options: argparse.Namespace, problems: list[str]) -> Iterator[Event]:
    """Return the events of rank 0 from a JSON Lines file or an event log."""
    path = options.run / NAME if (options.run / NAME).is_file() else options.run
    if path.is_file():
        return read_json_lines(path, follow=options.follow, on_problem=problems.append)
    if not path.is_dir() or not event_files_so_far(path):
        raise TrackerError(f"{options.run} has no {NAME} and no event log; pass a run's folder")
    first = EventFilter(ranks=[0])
    if options.follow:
        return _until_end(follow_events(path, first))
    return read_events(path, first, on_problem=problems.append)


def _until_end(events: Iterator[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        if event.kind == "end":
            return

"""Interface between a tracker and its destinations."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from attrs import field, frozen

from ms_profile.errors import TrackerError
from ms_profile.files.untrusted import check_path

Value = int | float | str
Outcome = Literal["finished", "stopped", "failed"]
"""End of a run: finished, stopped so that it can be resumed, or failed with an error."""


@frozen(kw_only=True)
class Point:
    """One event as passed to destinations; names are `kind/field`, such as `step/loss`."""

    kind: str
    """Kind of the event, such as `step`; `resume` means that later steps will be repeated."""
    step: int | None
    """The field `step`; None for events without it, such as settings."""
    wall_s: float
    """Unix time of the event."""
    numbers: Mapping[str, float] = field(factory=dict)
    """Values to plot."""
    texts: Mapping[str, str] = field(factory=dict)
    """Text values, such as samples."""


@frozen(kw_only=True)
class RunStart:
    """Information at the time a run is opened, which is its first event."""

    name: str | None
    """Display name. None: the destination chooses one."""
    settings: Mapping[str, Value]
    """Settings of the run, by name."""
    step: int | None
    """First step to come; existing data from this step on is from an interrupted run."""


class OpenRun(Protocol):
    """A run being written; all calls come from one thread, and exceptions are logged."""

    def write(self, points: Sequence[Point], /) -> None:
        """Write points in the order of their events; points without a step are settings."""

    def close(self, outcome: Outcome, /) -> None:
        """Write pending data and set the run's status."""


class Destination(Protocol):
    """A service or folder that events are sent to."""

    @property
    def title(self) -> str:
        """Name for messages."""

    @property
    def measures_system(self) -> bool:
        """Whether the destination records memory and CPU usage itself."""

    def check(self) -> None:
        """Check that the destination can be used.

        Raises:
            TrackerError: a library is missing.
        """

    def open(self, start: RunStart, /) -> OpenRun:
        """Start the run, or continue it."""


def checked_folder(value: str | Path) -> Path:
    """Return the folder if it can be written.

    Raises:
        TrackerError: the path is invalid, or a file exists there.
    """
    check_path("folder", value, error=TrackerError, written="folder")
    return Path(value)


def need_library(module: str, *, extra: str, package: str) -> None:
    """Check that a destination's library is installed, without importing it.

    Raises:
        TrackerError: it is not installed.
    """
    if find_spec(module) is None:
        raise TrackerError(
            f"{package} is not installed; install it with pip install 'ms-profile[{extra}]'"
        )

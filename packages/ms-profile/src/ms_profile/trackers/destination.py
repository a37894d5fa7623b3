"""What a tracker asks of a destination of events, and what it hands over."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from attrs import field, frozen

from ms_profile.errors import TrackerError
from ms_profile.files.untrusted import check_path

Value = int | float | str
Outcome = Literal["finished", "stopped", "failed"]
"""How a run ended: to its end, stopped so that it can go on, or by an error."""


@frozen(kw_only=True)
class Point:
    """One event as destinations take it; names are `kind/field`, such as `step/loss`."""

    kind: str
    """The event's kind, such as `step`; `resume` says that steps behind its own are done again."""
    step: int | None
    """The field `step`; None where the event has none, as settings do."""
    wall_s: float
    """Unix time of the event."""
    numbers: Mapping[str, float] = field(factory=dict)
    """Values that a curve can show."""
    texts: Mapping[str, str] = field(factory=dict)
    """Values that are text, such as samples."""


@frozen(kw_only=True)
class RunStart:
    """What is known when a run is opened, at its first event."""

    name: str | None
    """What people call it; None leaves the name to the destination."""
    settings: Mapping[str, Value]
    """Settings of the run, by name."""
    step: int | None
    """The first step to come: what stands at or behind it is of a run that was cut short."""


class OpenRun(Protocol):
    """A run that is written to. All calls come from one thread; whatever they raise is reported."""

    def write(self, points: Sequence[Point], /) -> None:
        """Take points in the order of their events; those without a step are settings."""

    def close(self, outcome: Outcome, /) -> None:
        """Write what is left, and say how the run ended."""


class Destination(Protocol):
    """Where events go."""

    @property
    def title(self) -> str:
        """Its name in messages."""

    @property
    def measures_system(self) -> bool:
        """Whether it measures memory and processors by itself."""

    def check(self) -> None:
        """Refuse at once what can't work.

        Raises:
            TrackerError: a library is missing.
        """

    def open(self, start: RunStart, /) -> OpenRun:
        """Begin the run, or go on with it."""


def checked_folder(value: str | Path) -> Path:
    """Return a folder that can be written, as a destination keeps it.

    Raises:
        TrackerError: no system takes the path, or a file stands there.
    """
    check_path("folder", value, error=TrackerError, written="folder")
    return Path(value)


def need_library(module: str, *, extra: str, package: str) -> None:
    """Refuse a destination whose library is not installed, without importing it.

    Raises:
        TrackerError: it is not installed.
    """
    if find_spec(module) is None:
        raise TrackerError(
            f"{package} is not installed; pip install 'ms-profile[{extra}]' brings it"
        )

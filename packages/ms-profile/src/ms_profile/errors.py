"""What can go wrong, by kind: each error is a `ProfileError` and the builtin nearest to it."""

from collections.abc import Iterable
from difflib import get_close_matches
from os import environ
from typing import ClassVar


class ProfileError(Exception):
    """Base of all errors that ms-profile raises."""

    exit_code: ClassVar[int] = 2
    """How a command ends that raises it: what was given has to be mended."""


class FormatError(ProfileError, ValueError):
    """A file is not of the format that it should have, or its parts contradict each other."""


class EventError(ProfileError, ValueError):
    """An event that cannot be recorded: a field of a wrong type, or a log of another process."""


class ClockError(ProfileError, ValueError):
    """Clocks that cannot be aligned from what was given."""


class MetricError(ProfileError, ValueError):
    """A metric of an unknown name."""


class CaptureError(ProfileError, ValueError):
    """A run that cannot be captured as asked: no such script, no torch, an output folder in use."""


class EnvironmentValueError(CaptureError):
    """A launcher's variable in the environment, such as `RANK`, that is no number."""


class RecordError(ProfileError, RuntimeError):
    """A recording that cannot be written: the disk is full, or the folder is not writable."""

    exit_code: ClassVar[int] = 1
    """The command's exit code: nothing that was given is wrong."""


class LinkError(ProfileError, ValueError):
    """Links that cannot be measured or fitted from what was given."""


class TraceError(ProfileError, ValueError):
    """A trace that cannot be read, or that lacks what was asked of it."""


class TrackerError(ProfileError, ValueError):
    """A tracker that cannot work as asked: its library is missing, or its folder is none."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, where one is near."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name nearest to `name`, or an empty string."""
    found = nearest_name(name, known)
    return f"; did you mean {found!r}?" if found else ""


def number_in_environment(name: str, default: int) -> int:
    """Read a number that a launcher put into the environment, such as `RANK`.

    Raises:
        EnvironmentValueError: it is none.
    """
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise EnvironmentValueError(f"the environment says {name}={text[:40]!r}; set a number")
    return int(text)

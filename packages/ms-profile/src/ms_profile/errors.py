"""Exceptions: each one is a `ProfileError` and the closest builtin exception."""

from collections.abc import Iterable
from difflib import get_close_matches
from os import environ
from typing import ClassVar


class ProfileError(Exception):
    """Base class of all ms-profile errors."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that raises this error: 2, bad input."""


class FormatError(ProfileError, ValueError):
    """A file has the wrong format, or its parts contradict each other."""


class EventError(ProfileError, ValueError):
    """An event cannot be recorded: a field has a wrong type, or another process owns the log."""


class ClockError(ProfileError, ValueError):
    """The clocks cannot be aligned from these measurements."""


class MetricError(ProfileError, ValueError):
    """A metric's name is unknown."""


class CaptureError(ProfileError, ValueError):
    """The run cannot be captured: no such script, torch is missing, or the folder is in use."""


class EnvironmentValueError(CaptureError):
    """An environment variable set by the launcher, such as `RANK`, is not a number."""


class RecordError(ProfileError, RuntimeError):
    """The recording cannot be written: the disk is full, or the folder is not writable."""

    exit_code: ClassVar[int] = 1
    """Exit code 1, a failure: the input itself is valid."""


class LaunchError(ProfileError, RuntimeError):
    """The ranks of a run cannot connect."""


class DoctorError(ProfileError, ValueError):
    """The machines cannot be examined as asked: no such device, or options that do not combine."""


class LinkError(ProfileError, ValueError):
    """The links cannot be measured, or no line can be fitted to the measurements."""


class ServeError(ProfileError, ValueError):
    """The live page cannot be served: the folder does not exist or the port is in use."""


class TraceError(ProfileError, ValueError):
    """A trace cannot be read, or lacks the data that an analysis needs."""


class TrackerError(ProfileError, ValueError):
    """A tracker cannot be used: its library is missing, or its folder is unusable."""


def nearest_name(name: str, candidates: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None if none is close."""
    matches = get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest known name, or an empty string."""
    match = nearest_name(name, candidates)
    return f"; did you mean {match!r}?" if match else ""


def number_in_environment(name: str, default: int) -> int:
    """Read an integer that a launcher put into the environment, such as `RANK`.

    Raises:
        EnvironmentValueError: the variable is not a number.
    """
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise EnvironmentValueError(
            f"the environment variable {name} must be a number, got {text[:40]!r}; set a number"
        )
    return int(text)

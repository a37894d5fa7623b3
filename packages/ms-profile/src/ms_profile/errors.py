"""What can go wrong, by kind: each error is a `ProfileError` and the builtin nearest to it."""

from collections.abc import Iterable
from difflib import get_close_matches


class ProfileError(Exception):
    """Base of all errors that ms-profile raises."""


class FormatError(ProfileError, ValueError):
    """A file is not what its name says, or its content does not hold together."""


class EventError(ProfileError, ValueError):
    """An event that cannot be recorded: a field of a wrong type, or a log of another process."""


class ClockError(ProfileError, ValueError):
    """Clocks that cannot be aligned from what was given."""


class MetricError(ProfileError, ValueError):
    """A metric of an unknown name."""


class CaptureError(ProfileError, RuntimeError):
    """A run could not be captured: no such script, no torch, an output folder in use."""


class LinkError(ProfileError, RuntimeError):
    """The links between ranks could not be measured."""


class TraceError(ProfileError, ValueError):
    """A trace that cannot be read, or that lacks what was asked of it."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name nearest to `name`, or an empty string."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""

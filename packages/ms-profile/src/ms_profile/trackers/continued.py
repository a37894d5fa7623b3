"""Keeps beside a run the name of its run in a tracker, so that a resumed training continues it."""

import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import read_json
from ms_profile.log.manifest import write_whole

LARGEST_BYTES = 4096


class TrackedRun(Struct, frozen=True, kw_only=True, tag="ms-profile.tracked.1", tag_field="format"):
    """Which run of a tracker events go to."""

    destination: str
    run: str
    """The tracker's own name of the run, unique in it."""


def known_run(path: Path, destination: str) -> str | None:
    """Return the run that was begun here, or None.

    Raises:
        FormatError: the file cannot be read, or speaks of another tracker.
    """
    if not path.exists():
        return None
    found = read_json(path, TrackedRun, error=FormatError, limit_bytes=LARGEST_BYTES)
    if found.destination != destination:
        raise FormatError(
            f"{path}: speaks of {found.destination}, not of {destination}; remove it or choose "
            "another folder"
        )
    return found.run


def remember_run(path: Path, destination: str, run: str) -> None:
    """Write down which run was begun.

    Raises:
        OSError: the place cannot be written.
    """
    note = TrackedRun(destination=destination, run=run)
    write_whole(path, msgspec.json.encode(note) + b"\n")


def fresh_name() -> str:
    """Return a name of a run that no other has."""
    return secrets.token_hex(8)

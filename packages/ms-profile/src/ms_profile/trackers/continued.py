"""Store the id of a run in a tracker next to its files, so that a resumed training continues it."""

import secrets
from pathlib import Path

import msgspec
from msgspec import Struct

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import read_json
from ms_profile.log.manifest import write_atomically

MAX_BYTES = 4096


class TrackedRun(Struct, frozen=True, kw_only=True, tag="ms-profile.tracked.1", tag_field="format"):
    """Run in a tracker that events are sent to."""

    destination: str
    run: str
    """Id of the run, unique in the tracker."""


def known_run(path: Path, destination: str) -> str | None:
    """Return the id of the run started in this folder, or None.

    Raises:
        FormatError: the file cannot be read, or belongs to another tracker.
    """
    if not path.exists():
        return None
    tracked = read_json(path, TrackedRun, error=FormatError, limit_bytes=MAX_BYTES)
    if tracked.destination != destination:
        raise FormatError(
            f"{path} belongs to {tracked.destination}, not to {destination}; remove it or choose "
            "another folder"
        )
    return tracked.run


def remember_run(path: Path, destination: str, run: str) -> None:
    """Store the id of the run that was started.

    Raises:
        OSError: the file cannot be written.
    """
    note = TrackedRun(destination=destination, run=run)
    write_atomically(path, msgspec.json.encode(note) + b"\n")


def new_run_id() -> str:
    """Return a unique random run id."""
    return secrets.token_hex(8)

"""Ownership of an output folder: a lock during the run and a permanent record of the run.

The lock file (`lock`) is locked with flock, which the kernel releases when a process is killed; its
text names the holder. The record (`run.json`, the seal) stores the run's command, model, dataset
and settings. A different command, model or dataset is rejected; changed settings are reported.
"""

import errno
import fcntl
import hashlib
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ..errors import FolderError
from .durable import write_file, writing
from .untrusted import decoding, read_json

LOCK, SEAL = "lock", "run.json"
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks, where users must avoid concurrent runs themselves."""
POLL_S = 0.1


class RunSeal(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="ms-run/1",
    tag_field="format",
):
    """Record of the run that owns a folder: the content of `run.json`."""

    command: str = msgspec.field(name="kind")
    """Command, such as `ms-align ppo`."""
    started: str = msgspec.field(name="begun")
    """Start of the run: UTC, ISO 8601."""
    identity: dict[str, str]
    """Settings that identify the run, by name: model and dataset."""
    settings: dict[str, Any]
    """All settings by name, as JSON values."""
    digest: str = ""
    """BLAKE2b of the other fields, to detect damage."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that changed since the run started."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        """Format the change for messages."""
        return f"{self.name} is {_text(self.after)}, was {_text(self.before)}"


@contextmanager
def lock_run_folder(
    folder: Path,
    *,
    command: str,
    identity: Mapping[str, str],
    settings: Mapping[str, Any],
    fixed: Collection[str] = (),
    writes: Collection[str] = (),
    wait_s: float = 0.0,
    note: Callable[[str], None] = lambda line: None,
) -> Iterator[list[Change]]:
    """Create `folder` if necessary and lock it for this run during the `with` block.

    Args:
        folder: the run's output folder.
        command: name of the command, such as `ms-align ppo`.
        identity: values that identify the run: paths or names of model and dataset.
        settings: all settings as JSON types; stored in the record.
        fixed: names of settings that must not change when the run resumes.
        writes: files that this command creates in the folder. If any of them exists without a
            record, the folder is rejected.
        wait_s: seconds to wait for a lock holder, which may be about to exit.
        note: called with a line of text when waiting starts.

    Yields:
        Settings that changed since the last launch, none of them in `fixed`.

    Raises:
        FolderError: another process holds the lock, or the folder belongs to another run.
    """
    with locked(folder / LOCK, resource=str(folder), command=command, wait_s=wait_s, note=note):
        new = RunSeal(
            command=command,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            identity=dict(identity),
            settings=msgspec.to_builtins(dict(settings)),
        )
        old = read_seal(folder)
        if old is None:
            _check_unowned(folder, command, writes)
            changes: list[Change] = []
        else:
            _check_same(folder, old, new)
            changes = changes_between(old, new)
            _check_fixed(folder, changes, fixed)
            new = msgspec.structs.replace(new, started=old.started)
        if old is None or changes:
            write_seal(folder, new)
        yield changes


def read_seal(folder: Path) -> RunSeal | None:
    """Read the record of a folder; None if it has no record.

    Raises:
        FolderError: the record is damaged.
    """
    path = folder / SEAL
    if not os.path.lexists(path):
        return None
    remedy = "move the folder away or set another output_dir"
    try:
        seal = read_json(path, RunSeal, error=FolderError, limit_bytes=2**24)
    except FolderError as error:
        raise FolderError(
            f"{error}, so the run that owns the folder is unknown; {remedy}"
        ) from error
    if seal.digest != digest_of(seal):
        raise FolderError(f"{path}: damaged, so the run that owns the folder is unknown; {remedy}")
    return seal


def inside(path: str | Path, folder: str | Path) -> bool:
    """Return True if `path` is `folder` or inside it, after resolving symlinks.

    Raises:
        FolderError: `path` or `folder` is not a valid path.
    """
    with decoding(f"{path} or {folder}", error=FolderError):
        resolved, resolved_folder = Path(path).resolve(), Path(folder).resolve()
    return resolved == resolved_folder or resolved_folder in resolved.parents


@contextmanager
def locked(
    lock: Path,
    *,
    resource: str,
    command: str = "",
    wait_s: float = 0.0,
    note: Callable[[str], None] = lambda line: None,
    state: str = "in use",
    remedy: str = "choose another output_dir",
    keep: bool = True,
) -> Iterator[None]:
    """Hold the lock file `lock` during the `with` block; its folder is created if necessary.

    Args:
        lock: path of the lock file; its text names the holder.
        resource: name of the locked resource, for messages.
        command: command that takes the lock; written to the file.
        wait_s: seconds to wait for another holder.
        note: called with a line of text when waiting starts.
        state: state of the resource while it is locked, for messages.
        remedy: alternative to waiting, for messages.
        keep: leave the lock file in place afterwards.

    Raises:
        FolderError: another process still holds the lock after `wait_s` seconds.
        WriteError: the file cannot be created.
    """
    deadline = time.monotonic() + wait_s
    with ExitStack() as stack:
        while True:
            with writing(lock, remedy=remedy):
                lock.parent.mkdir(parents=True, exist_ok=True)
                descriptor = _open_lock(lock, remedy)
            stack.callback(os.close, descriptor)
            noted = False
            while (holder := _holder(descriptor)) is not None:
                if time.monotonic() >= deadline:
                    raise FolderError(
                        f"{resource} is {state} by {holder}; wait for it, or {remedy}"
                    )
                if not noted:
                    note(f"waiting up to {wait_s:g} s for {resource}, {state} by {holder}")
                    noted = True
                time.sleep(POLL_S)
            if _is_named(descriptor, lock):
                break
        # Omit the command's arguments, which may contain keys and passwords.
        owner = f"process {os.getpid()} on {socket.gethostname()}: {''.join(sys.argv[:1])[:200]}\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, ", ".join(filter(None, (command, owner))).encode(errors="replace"), 0)
        if not keep:
            stack.callback(lock.unlink, missing_ok=True)
        yield


def _open_lock(lock: Path, remedy: str) -> int:
    """Open the lock file without following symlinks: a link's target would be overwritten."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(lock, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise FolderError(f"{lock} is a symbolic link; remove it, or {remedy}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FolderError(f"{lock} is not a regular file; remove it, or {remedy}")
    return descriptor


def _holder(descriptor: int) -> str | None:
    """Try to take the lock; return its holder if that fails."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
        return "".join(c for c in holder if c.isprintable())[:300] or "another process"
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
    return None


def _is_named(descriptor: int, path: Path) -> bool:
    """Return True if `path` is still the open file; the previous holder may have deleted it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _check_unowned(folder: Path, command: str, writes: Collection[str]) -> None:
    existing = sorted(name for name in writes if os.path.lexists(folder / name))
    if existing:
        raise FolderError(
            f"{folder} contains {existing[0]!r} but no record of a run of {command!r}; move the"
            " folder away or set another output_dir"
        )


def _check_same(folder: Path, old: RunSeal, new: RunSeal) -> None:
    owner = f"{folder} belongs to a run of {old.command!r}, started {old.started}"
    if old.command != new.command:
        raise FolderError(f"{owner}, and this is {new.command!r}; set another output_dir")
    for name, value in new.identity.items():
        before = old.identity.get(name)
        if before != value:
            raise FolderError(
                f"{owner}, whose {name} was {_text(before)} and is now {_text(value)}; change it"
                " back or set another output_dir"
            )


def changes_between(old: RunSeal, new: RunSeal) -> list[Change]:
    """Return the settings that differ between two records."""
    names = [*new.settings, *(name for name in old.settings if name not in new.settings)]
    pairs = ((name, old.settings.get(name), new.settings.get(name)) for name in names)
    return [Change(name=name, before=a, after=b) for name, a, b in pairs if a != b]


def _check_fixed(folder: Path, changes: list[Change], fixed: Collection[str]) -> None:
    broken = [change for change in changes if change.name in fixed]
    if broken:
        details = "; ".join(map(str, broken))
        raise FolderError(
            f"{folder} holds a run that cannot resume with changed settings: {details}; restore"
            " them or set another output_dir"
        )


def write_seal(folder: Path, seal: RunSeal) -> None:
    """Write the record of a folder atomically, with its digest."""
    sealed = msgspec.structs.replace(seal, digest=digest_of(seal))
    write_file(folder / SEAL, msgspec.json.format(msgspec.json.encode(sealed), indent=2) + b"\n")


def digest_of(sealed: msgspec.Struct) -> str:
    """Return the BLAKE2b of a Struct without its field `digest`."""
    content = msgspec.json.encode(msgspec.structs.replace(sealed, digest=""), order="deterministic")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _text(value: Any) -> str:
    return "not given" if value is None else msgspec.json.encode(value).decode()

"""Ownership of the output folder: the run that may write to it and resume in it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, fields, frozen, has

from ms_align import processes
from ms_align.errors import AlignError, FolderError
from ms_align.files.run_folder import Change, inside, lock_run_folder, locked, read_seal
from ms_align.secret_text import without_secret, without_secrets

WRITES = ("checkpoints", "model", "adapter")
"""Entries of the output folder that every run writes."""
UNSAVED_RUN_FILES = {"lock", "run.json", "events.jsonl"}
"""Files in the output folder of a run that ended before saving anything."""
NOT_SETTINGS = {
    *("output_dir", "resume", "log_every", "progress", "on_event"),
    *("checkpoint_every", "keep_checkpoints", "checkpoint_store", "eval_every", "eval_samples"),
}
"""Settings that do not affect a run's result."""


@frozen(kw_only=True)
class Ownership:
    """Identity and settings of a run, recorded in its output folder."""

    command: str
    """Command, such as `ms-align ppo`."""
    identity: Mapping[str, str]
    """Model, dataset and checksums of in-memory objects; they must be equal to resume."""
    settings: Mapping[str, Any] = field(factory=dict)
    """Settings that affect the result, by name."""
    fixed: Collection[str] = ()
    """Settings that must not change when the run resumes."""
    reads: Mapping[str, Any] = field(factory=dict)
    """Input models by setting; input folders are never overwritten."""

    @contextmanager
    def lock_folder(self, folder: Path) -> Iterator[list[Change]]:
        """Lock `folder` inside the `with` block. All ranks must call it; rank 0 takes the lock.

        Raises:
            FolderError: it belongs to another run, or contains a model that the run reads.
        """
        problem: AlignError | None = None
        changes: list[Change] = []
        with ExitStack() as stack:
            if processes.rank() == 0:
                try:
                    self._check_reads(folder)
                    self._clear(folder)
                    changes = stack.enter_context(
                        lock_run_folder(
                            folder,
                            command=self.command,
                            identity=self.identity,
                            settings=self.settings,
                            fixed=self.fixed,
                            writes=WRITES,
                        )
                    )
                except AlignError as error:
                    problem = error
            # Raise on all ranks, or the others would wait in the next collective.
            if processes.any_of(problem is not None):
                raise problem or FolderError(f"the first process cannot work in {folder}")
            yield changes

    def _check_reads(self, folder: Path) -> None:
        for name, model in self.reads.items():
            if not isinstance(model, str | Path) or not inside(model, folder):
                continue
            owner = read_seal(folder)
            # A resumed run may read a model from its own folder, such as one it wrote before.
            if owner is None or owner.command != self.command or owner.identity != self.identity:
                owner_text = "" if owner is None else f" of {owner.command!r}"
                raise FolderError(
                    f"{name} is {str(model)!r}, which is in the output_dir {str(folder)!r}"
                    f"{owner_text} and would be overwritten; set another output_dir"
                )

    def _clear(self, folder: Path) -> None:
        """Remove the run record of a run that ended before it saved anything."""
        if not folder.is_dir() or {path.name for path in folder.iterdir()} - UNSAVED_RUN_FILES:
            return
        # Raises if that run is still active.
        with locked(folder / "lock", resource=str(folder), command=self.command):
            (folder / "run.json").unlink(missing_ok=True)


def plain(settings: Any) -> dict[str, Any]:
    """Return the settings of an attrs instance that affect the result, as JSON values.

    Other objects, such as a client of a reward server, are represented by their class name: their
    fields may hold keys and passwords.
    """
    values = {
        attribute.name: _value(getattr(settings, attribute.name))
        for attribute in fields(type(settings))
    }
    # A JSON round trip, so that values compare equal to those in run.json: tuples become lists.
    decoded = msgspec.json.decode(msgspec.json.encode(values), type=dict[str, Any])
    return {name: value for name, value in decoded.items() if name not in NOT_SETTINGS}


def _value(value: Any) -> Any:
    """Convert plain values and nested settings to JSON values, anything else to its name."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return without_secrets(str(value))
    if isinstance(value, Mapping):
        return {
            str(key): without_secret(str(key), item) if isinstance(item, str) else _value(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(item) for item in value]
    # Fields of other packages' classes may hold secrets.
    if has(type(value)) and type(value).__module__.partition(".")[0] in ("ms_align", "ms_parallel"):
        attributes = fields(type(value))
        return {item.name: _value(getattr(value, item.name)) for item in attributes}
    return str(getattr(value, "__qualname__", type(value).__qualname__))

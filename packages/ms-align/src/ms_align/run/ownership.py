"""Whose a run's folder is: what the run is made from, its settings, and who may go on in it."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, fields, frozen, has

from ms_align import processes
from ms_align.errors import AlignError, FolderError
from ms_align.files.run_folder import Change, hold, inside, locked, owner_of
from ms_align.secret_text import without_secret, without_secrets

WRITES = ("checkpoints", "model", "adapter")
"""What every kind of run writes into its folder."""
LEFT_BY_NOTHING = {"lock", "run.json", "events.jsonl"}
"""What lies in the folder of a run that ended before it kept anything."""
NOT_SETTINGS = {
    *("output_dir", "resume", "log_every", "progress", "on_event"),
    *("checkpoint_every", "keep_checkpoints", "evaluate_every", "evaluate_samples"),
}
"""Settings that change nothing in what a run comes to."""


@frozen(kw_only=True)
class Ownership:
    """What a run says of itself when it takes a folder."""

    kind: str
    """The command, such as `ms-align ppo`."""
    identity: Mapping[str, str]
    """What makes it this run: model, dataset, and checksums of what is only in memory."""
    settings: Mapping[str, Any] = field(factory=dict)
    fixed: Collection[str] = ()
    """Settings that cannot change while the run goes on."""
    reads: Mapping[str, Any] = field(factory=dict)
    """Models that it begins from, by setting; those that are folders are never written over."""

    @contextmanager
    def hold(self, folder: Path) -> Iterator[list[Change]]:
        """Hold `folder` while the block runs; every process must call it, the first one holds.

        Raises:
            FolderError: it is another run's, or a model that the run reads lies in it.
        """
        problem: AlignError | None = None
        changes: list[Change] = []
        with ExitStack() as stack:
            if processes.rank() == 0:
                try:
                    self._check_reads(folder)
                    self._clear(folder)
                    changes = stack.enter_context(
                        hold(
                            folder,
                            kind=self.kind,
                            identity=self.identity,
                            settings=self.settings,
                            fixed=self.fixed,
                            writes=WRITES,
                        )
                    )
                except AlignError as error:
                    problem = error
            if processes.any_of(problem is not None):
                raise problem or FolderError(f"the first process cannot work in {folder}")
            yield changes

    def _check_reads(self, folder: Path) -> None:
        for name, given in self.reads.items():
            if not isinstance(given, str | Path) or not inside(given, folder):
                continue
            owner = owner_of(folder)
            if owner is None or owner.kind != self.kind or owner.identity != self.identity:
                whose = "" if owner is None else f" of {owner.kind!r}"
                raise FolderError(
                    f"{name} is {str(given)!r}, which lies in the output_dir {str(folder)!r}{whose}"
                    " and would be written over; choose another output_dir"
                )

    def _clear(self, folder: Path) -> None:
        """Remove the seal of a run that ended before it kept anything."""
        if not folder.is_dir() or {path.name for path in folder.iterdir()} - LEFT_BY_NOTHING:
            return
        with locked(folder / "lock", what=str(folder), kind=self.kind):
            (folder / "run.json").unlink(missing_ok=True)


def plain(settings: Any) -> dict[str, Any]:
    """Give the settings of an attrs instance that change a result, as JSON holds them.

    Objects of a caller, such as a client of a reward server, are given by name: their fields may
    hold keys and passwords.
    """
    values = {each.name: _value(getattr(settings, each.name)) for each in fields(type(settings))}
    # As they are read back: a tuple would not equal the list that it was written as.
    found = msgspec.json.decode(msgspec.json.encode(values), type=dict[str, Any])
    return {name: value for name, value in found.items() if name not in NOT_SETTINGS}


def _value(value: Any) -> Any:
    """Give plain values and tables of settings as they are, and the name of anything else."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return without_secrets(str(value))
    if isinstance(value, Mapping):
        return {
            str(key): without_secret(str(key), each) if isinstance(each, str) else _value(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(each) for each in value]
    if has(type(value)) and type(value).__module__.partition(".")[0] in ("ms_align", "ms_parallel"):
        return {each.name: _value(getattr(value, each.name)) for each in fields(type(value))}
    return str(getattr(value, "__qualname__", type(value).__qualname__))

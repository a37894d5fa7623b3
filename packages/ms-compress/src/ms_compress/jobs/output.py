"""The folder that a command writes: held by one run, sealed by it, and never another's.

It appears when all is written, with `run.json` in it, which says what kind of run it is of, from
which model and text, and with which settings. The same run again finds it finished.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen
from msgspec import structs

from ms_compress.commands.command import Outcome
from ms_compress.commands.options import ModelRun
from ms_compress.errors import ConfigError, FolderError
from ms_compress.files.run_folder import Change, RunSeal, changes_between, owner_of, write_seal
from ms_compress.jobs.loading import digest, digest_of_file
from ms_compress.place_lock import alone
from ms_compress.training.checkpoint import DIGEST, read_header, steps_held

__all__ = ["Output", "output"]

NO_STEP = ("output_dir", "tokenizer", "verify")
"""Settings that no step of a training follows from."""
CONTENTS = "contents of {}"
"""The name of the fact that a folder or file holds what it held."""


@frozen(kw_only=True)
class Output:
    """The place of a run's folder, held for this run."""

    folder: Path
    run: RunSeal
    """What this run is."""
    steps: int
    finished: bool
    """The folder is there, and is this run's."""

    @property
    def kept(self) -> Path:
        """The file that keeps the state of the run's training, until the folder is there."""
        return self.folder.with_name(f"{self.folder.name}.training")

    @property
    def kept_for(self) -> dict[str, str]:
        """What the training's steps follow from, by name."""
        facts = {**self.run.identity, **self.run.settings}
        # What the model and the text are is told by what they hold, wherever it lies.
        left = (*NO_STEP, "model", "teacher", "dataset", CONTENTS.format("dataset"))
        return {
            "command": self.run.kind,
            **{name: _fact(value) for name, value in facts.items() if name not in left},
        }

    def steps_made(self) -> int | None:
        """How many steps an earlier run of the same command has kept, if any.

        Raises:
            ConfigError: the file that keeps them is damaged.
        """
        return steps_held(self.kept, self.kept_for) if self.kept.is_file() else None

    def seal(self, folder: Path) -> None:
        """Say in the folder whose it is."""
        write_seal(folder, self.run)

    def end(self) -> None:
        """The folder is written: its training's state is not needed any more."""
        self.kept.unlink(missing_ok=True)

    def already(self) -> Outcome:
        """What is said of a run that is finished."""
        return Outcome(
            lines=(f"{self.folder}: this run is finished; remove the folder to do it again",),
            facts={"folder": str(self.folder), "finished_before": True},
        )


@contextmanager
def output(command: str, options: ModelRun) -> Iterator[Output]:
    """Hold the place of a run's folder, from before its work until it is written.

    Raises:
        ConfigError: the folder is there and nothing says whose it is, or the kept state of its
            training is damaged.
        FolderError: another process holds the place, or the folder is another run's.
    """
    run = _run(command, options)
    folder = options.output_dir
    with alone(folder):
        made = Output(folder=folder, run=run, steps=options.tuning.steps, finished=False)
        if made.kept.is_file():
            read_header(made.kept)
        if os.path.lexists(folder):
            _check_owner(made)
            if made.steps_made() == made.steps:  # it was killed after its folder was written
                made.end()
            made = attrs.evolve(made, finished=True)
        yield made


def _check_owner(made: Output) -> None:
    """Refuse a folder that is not this very run's."""
    owner = owner_of(made.folder)
    if owner is None:
        raise ConfigError(f"{made.folder} exists; remove it, or choose another output_dir")
    told = f"{made.folder} is of a run of {owner.kind!r}, begun {owner.begun}"
    if owner.kind != made.run.kind:
        raise FolderError(f"{told}, and this is {made.run.kind!r}; choose another output_dir")
    changes = changes_between(_flat(owner), _flat(made.run))
    if changes:
        named = ", ".join(map(_told, changes))
        raise FolderError(
            f"{told}, which is finished, with other settings: {named}; remove it to run again, or"
            " choose another output_dir"
        )


def _told(change: Change) -> str:
    """A change as people read it; digests say nothing to them."""
    return f"{change.name} changed" if _is_digest(change.now, change.before) else str(change)


def _fact(value: object) -> str:
    return str(value) if _is_digest(value) else repr(value)


def _is_digest(*values: object) -> bool:
    return any(isinstance(value, str) and value.startswith(DIGEST) for value in values)


def _flat(seal: RunSeal) -> RunSeal:
    """Its identity as settings beside the others."""
    return structs.replace(seal, identity={}, settings={**seal.identity, **seal.settings})


def _run(command: str, options: ModelRun) -> RunSeal:
    """What a run is: its command, model and text, and its settings as JSON holds them."""
    settings = {
        name: _plain(value)
        for name, value in attrs.asdict(options, recurse=False).items()
        if name not in ("output_dir", "tuning")
    }
    settings |= {f"tuning.{name}": value for name, value in attrs.asdict(options.tuning).items()}
    identity = {name: settings.pop(name) for name in ("model", "dataset")}
    for name, value in (*identity.items(), ("teacher", settings.get("teacher"))):
        if value is not None:
            settings[CONTENTS.format(name)] = _contents(Path(value))
    return RunSeal(
        kind=f"ms-compress {command}",
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        identity={name: value for name, value in identity.items() if value is not None},
        settings=settings,
    )


def _plain(value: object) -> Any:
    """A setting as JSON holds it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, tuple) else str(value)


def _contents(path: Path) -> str:
    """A digest of a model's folder, of a dataset's index, or of a file; empty of what is none."""
    if path.is_file():
        return digest_of_file(path)
    index = path / "index.json"
    if index.is_file():
        return digest_of_file(index)
    return digest(path) if path.is_dir() else ""

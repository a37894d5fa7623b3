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
from ms_compress.files.run_folder import RunSeal, changes_between, owner_of, write_seal
from ms_compress.place_lock import output_lock
from ms_compress.training.checkpoint import read_header, saved_steps
from ms_compress.training.identity import digest_of_path, is_digest

NO_STEP = ("output_dir", "tokenizer", "verify")
"""Settings that no step of a training follows from."""
CONTENTS = "contents of {}"
"""The name of the fact that a folder or file holds what it held."""


@frozen(kw_only=True)
class RunOutput:
    """The output folder of one run, while that run holds it."""

    folder: Path
    run: RunSeal
    """What this run is."""
    steps: int
    finished: bool
    """The folder is there, and is this run's."""

    @property
    def checkpoint(self) -> Path:
        """The file that holds the state of the run's training, until the folder is there."""
        return self.folder.with_name(f"{self.folder.name}.training")

    @property
    def identity(self) -> dict[str, str]:
        """What the training's steps follow from, by name."""
        settings = {**self.run.identity, **self.run.settings}
        # A model and a text are what they hold, wherever it lies.
        left_out = (*NO_STEP, "model", "teacher", "dataset", CONTENTS.format("dataset"))
        texts = {
            name: str(value) if is_digest(value) else repr(value)
            for name, value in settings.items()
            if name not in left_out
        }
        return {"command": self.run.kind, **texts}

    def steps_made(self) -> int | None:
        """Return how many steps an earlier run of the same command has saved, if any.

        Raises:
            ConfigError: their checkpoint is damaged.
        """
        return saved_steps(self.checkpoint, self.identity) if self.checkpoint.is_file() else None

    def seal(self, folder: Path) -> None:
        """Write into the folder which run wrote it."""
        write_seal(folder, self.run)

    def end(self) -> None:
        """Remove the checkpoint: the folder is written. What is not a file is somebody else's."""
        if self.checkpoint.is_file():
            self.checkpoint.unlink()

    def already(self) -> Outcome:
        """Return what is said of a run that is finished."""
        return Outcome(
            lines=(f"{self.folder}: this run is finished; remove the folder to do it again",),
            facts={"folder": str(self.folder), "finished_before": True},
        )


@contextmanager
def run_output(command: str, options: ModelRun) -> Iterator[RunOutput]:
    """Hold a run's output folder, from before its work until it is written.

    Raises:
        ConfigError: the folder is there and nothing says whose it is, or the checkpoint of its
            training is damaged.
        FolderError: another process holds the place, or the folder is another run's.
    """
    run = _run(command, options)
    folder = options.output_dir
    with output_lock(folder):
        made = RunOutput(folder=folder, run=run, steps=options.tuning.steps, finished=False)
        if made.checkpoint.is_file():
            read_header(made.checkpoint)
        if os.path.lexists(folder):
            _check_owner(made)
            if made.steps_made() == made.steps:  # it was killed after its folder was written
                made.end()
            made = attrs.evolve(made, finished=True)
        yield made


def _check_owner(made: RunOutput) -> None:
    """Refuse a folder that another run wrote."""
    owner = owner_of(made.folder)
    if owner is None:
        raise ConfigError(f"{made.folder} exists; remove it, or choose another output_dir")
    whose = f"{made.folder} is of a run of {owner.kind!r}, begun {owner.begun}"
    if owner.kind != made.run.kind:
        raise FolderError(f"{whose}, and this is {made.run.kind!r}; choose another output_dir")
    changes = changes_between(_flat(owner), _flat(made.run))
    if changes:
        # Digests say nothing to people.
        named = ", ".join(
            f"{each.name} changed" if is_digest(each.now, each.before) else str(each)
            for each in changes
        )
        raise FolderError(
            f"{whose}, which is finished, with other settings: {named}; remove it to run again, or"
            " choose another output_dir"
        )


def _flat(seal: RunSeal) -> RunSeal:
    """Return a seal whose identity stands among its settings."""
    return structs.replace(seal, identity={}, settings={**seal.identity, **seal.settings})


def _run(command: str, options: ModelRun) -> RunSeal:
    """Describe a run: its command, model and text, and its settings as JSON holds them."""
    settings = {
        name: _plain(value)
        for name, value in attrs.asdict(options, recurse=False).items()
        if name not in ("output_dir", "tuning")
    }
    settings |= {f"tuning.{name}": value for name, value in attrs.asdict(options.tuning).items()}
    identity = {name: settings.pop(name) for name in ("model", "dataset")}
    for name, value in (*identity.items(), ("teacher", settings.get("teacher"))):
        if value is not None:
            settings[CONTENTS.format(name)] = digest_of_path(Path(value))
    return RunSeal(
        kind=f"ms-compress {command}",
        begun=datetime.now(UTC).isoformat(timespec="seconds"),
        identity={name: value for name, value in identity.items() if value is not None},
        settings=settings,
    )


def _plain(value: object) -> Any:
    """Convert a setting to what JSON holds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, tuple) else str(value)

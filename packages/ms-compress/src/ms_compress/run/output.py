"""Output folder of a command: locked by one run, and sealed with its description.

The folder appears once everything is written, with a `run.json` that records the command, model,
text and settings. Running the same command again finds it finished.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen
from msgspec import structs
from torch import Tensor

from ms_compress.errors import ConfigError, FolderError
from ms_compress.files.run_folder import RunSeal, changes_between, read_seal, write_seal
from ms_compress.methods.data_ranks import ONE_PROCESS, DataRanks
from ms_compress.options import ModelRun
from ms_compress.output_lock import output_lock
from ms_compress.run.outcome import Outcome
from ms_compress.training.checkpoint import (
    BlockFiles,
    calibration_identity,
    digest_of_path,
    is_digest,
    read_header,
    saved_steps,
)

NO_STEP = ("output_dir", "tokenizer", "verify")
"""Settings that do not affect the training steps."""
CONTENTS = "contents of {}"
"""Name of the setting that stores the digest of a folder or file."""


@frozen(kw_only=True)
class RunOutput:
    """The output folder of a run that holds its lock."""

    folder: Path
    run: RunSeal
    """Description of this run."""
    steps: int
    finished: bool
    """The folder exists and belongs to this run."""

    @property
    def checkpoint(self) -> Path:
        """File with the state of the run's training, until the folder exists."""
        return self.folder.with_name(f"{self.folder.name}.training")

    def layer_checkpoint(self, batches: Sequence[Tensor], processes: int = 1) -> BlockFiles:
        """Return the storage of calibrated decoder layers, until the folder exists.

        Args:
            batches: the calibration batches of all processes.
            processes: number of processes, on which the rounding of the statistics' sums depends.
        """
        count = {"processes": str(processes)} if processes > 1 else {}
        identity = calibration_identity({**self.identity, **count}, batches)
        return BlockFiles(folder=self._calibration, identity=identity)

    @property
    def _calibration(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.calibration")

    @property
    def identity(self) -> dict[str, str]:
        """Settings that the training steps depend on, by name."""
        settings = {**self.run.identity, **self.run.settings}
        # Models and texts are identified by their contents, wherever they are stored.
        excluded = (*NO_STEP, "model", "teacher", "dataset", CONTENTS.format("dataset"))
        texts = {
            name: str(value) if is_digest(value) else repr(value)
            for name, value in settings.items()
            if name not in excluded
        }
        return {"command": self.run.command, **texts}

    def saved_steps(self) -> int | None:
        """Return the number of steps that an earlier run of this command saved, or None.

        Raises:
            ConfigError: its checkpoint is damaged.
        """
        return saved_steps(self.checkpoint, self.identity) if self.checkpoint.is_file() else None

    def seal(self, folder: Path) -> None:
        """Write the description of this run into the folder."""
        write_seal(folder, self.run)

    def end(self) -> None:
        """Remove the checkpoints once the folder is written; keep all other files."""
        if self.checkpoint.is_file():
            self.checkpoint.unlink()
        BlockFiles(folder=self._calibration, identity={}).remove()

    def already_finished(self) -> Outcome:
        """Return the outcome of a run that was finished before."""
        return Outcome(
            lines=(f"{self.folder}: this run is finished; remove the folder to run it again",),
            facts={"folder": str(self.folder), "finished_before": True},
        )


@contextmanager
def run_output(
    command: str, options: ModelRun, ranks: DataRanks = ONE_PROCESS
) -> Iterator[RunOutput]:
    """Lock a run's output folder for the duration of the block; the first process has the lock.

    Raises:
        ConfigError: the folder exists and was not written by a run, or the checkpoint of its
            training is damaged.
        FolderError: another process holds the lock, or the folder belongs to another run.
    """
    run = _run(command, options)
    folder = options.output_dir
    with output_lock(folder) if ranks.is_first else nullcontext():
        output = RunOutput(folder=folder, run=run, steps=options.tuning.steps, finished=False)
        if output.checkpoint.is_file():
            read_header(output.checkpoint)  # reports damage before a model is loaded
        if ranks.is_first and os.path.lexists(folder):
            _check_owner(output)
            if output.saved_steps() in (None, output.steps):  # killed after its folder was written
                output.end()
            output = attrs.evolve(output, finished=True)
        yield attrs.evolve(output, finished=ranks.any(output.finished))


def _check_owner(output: RunOutput) -> None:
    """Raise unless the existing folder was written by this run."""
    owner = read_seal(output.folder)
    if owner is None:
        raise ConfigError(f"{output.folder} exists; remove it or set another output_dir")
    description = f"{output.folder} belongs to a run of {owner.command!r}, started {owner.started}"
    if owner.command != output.run.command:
        raise FolderError(
            f"{description}, and this is {output.run.command!r}; set another output_dir"
        )
    changes = changes_between(_flat(owner), _flat(output.run))
    if changes:
        # Digests are meaningless to users.
        differences = ", ".join(
            f"{change.name} changed" if is_digest(change.after, change.before) else str(change)
            for change in changes
        )
        raise FolderError(
            f"{description} and finished with other settings: {differences}; remove it to run"
            " again, or set another output_dir"
        )


def _flat(seal: RunSeal) -> RunSeal:
    """Return a seal with its identity merged into its settings."""
    return structs.replace(seal, identity={}, settings={**seal.identity, **seal.settings})


def _run(command: str, options: ModelRun) -> RunSeal:
    """Describe a run: command, model, text and settings as JSON values."""
    settings = {
        name: _plain(value)
        for name, value in attrs.asdict(options, recurse=False).items()
        if name not in ("output_dir", "tuning")
    }
    settings |= {f"tuning.{name}": value for name, value in attrs.asdict(options.tuning).items()}
    # Paths are for people; below, the digests of the contents decide whether it is the same run.
    identity = {name: settings.pop(name) for name in ("model", "dataset")}
    for name, value in (*identity.items(), ("teacher", settings.get("teacher"))):
        if value is not None:
            settings[CONTENTS.format(name)] = digest_of_path(Path(value))
    return RunSeal(
        command=f"ms-compress {command}",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        identity={name: value for name, value in identity.items() if value is not None},
        settings=settings,
    )


def _plain(value: object) -> Any:
    """Convert a setting to a JSON value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return list(value) if isinstance(value, tuple) else str(value)

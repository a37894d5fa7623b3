"""The training loop of every trainer: update, log, evaluate, checkpoint, stop, resume.

A trainer provides a `Learner`: one update, and all state that is needed to resume. After any crash
the same command resumes from the last complete checkpoint, bit for bit.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Protocol

from attrs import asdict, define, field, frozen
from torch import nn

from ms_align import processes
from ms_align.checkpoint_store import CheckpointUploader
from ms_align.engines.protocol import StepReport
from ms_align.errors import CheckpointError, ConfigError, DamageError, NonFiniteError
from ms_align.events import JsonLines, OnEvent
from ms_align.processes import StopRequest
from ms_align.progress import RunDisplay, Throughput, duration
from ms_align.run import checkpoint
from ms_align.run.checkpoint import RunStore, State
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_SKIPS = 20
"""Skipped updates in a row after which the run fails."""
SKIP_REASONS = {
    "no_targets": "the batch has no targets",
    "nonfinite": "the gradient is not finite",
    "overflow": "the gradient overflowed float16",
    "refused": "the update was rejected",
}
"""Messages for skipped updates."""
METRICS_PER_LINE = 4
"""Metrics on a progress line, including the loss."""


@frozen(kw_only=True)
class RunLog:
    """Destination of events and messages during a run."""

    event: OnEvent
    note: Callable[[str], None]
    """Prints a line."""


@frozen(kw_only=True)
class Notice:
    """Fact about a run, logged before its first update as an event and as a line."""

    event: str
    """Name of the event."""
    fields: Mapping[str, int | float | str]
    line: str


class Learner(Protocol):
    """Interface of the loop to a training algorithm."""

    def update(self, log: RunLog) -> tuple[StepReport, Mapping[str, float]]:
        """Run one update, including any rollout it needs; return the report and its metrics."""

    def evaluate(self, log: RunLog) -> Mapping[str, float]:
        """Log samples and return held-out metrics by name; empty without held-out data."""

    def state(self) -> State:
        """Return the complete state, from which training resumes exactly."""

    def load(self, state: State) -> None:
        """Restore a state."""


@frozen(kw_only=True)
class Result:
    """Result of a training run."""

    step: int
    """Updates completed, over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command resumes."""
    first: Mapping[str, float]
    """Held-out metrics before the first update."""
    last: Mapping[str, float]
    """Held-out metrics at the end."""
    seconds: float
    """Training time over all launches, without evaluation and checkpoints."""
    signal_name: str = ""
    """The signal that stopped this launch, such as `SIGINT`."""
    model: nn.Module | None = None
    """The trained model, if this process holds it unsharded."""


@define(kw_only=True)
class _Progress:
    step: int = 0
    seconds: float = 0.0
    first: dict[str, float] = field(factory=dict)
    last: dict[str, float] = field(factory=dict)
    nonfinite: int = 0
    """Updates skipped because the loss or the gradient was not finite."""
    loss: float | None = None
    """Loss of the last update that had targets; None (JSON's null) if it was not finite."""


@define(eq=False)
class Loop:
    """Runs a learner for a number of updates."""

    learner: Learner
    steps: int = field(kw_only=True)
    """Total updates, over all launches."""
    options: RunOptions = field(kw_only=True)
    """Checkpoint, logging and resume settings."""
    folder: Path = field(kw_only=True)
    """Output folder, locked by this run."""
    owner: Ownership = field(kw_only=True)
    """Identity of the run; the output folder and its checkpoints must have the same."""
    write: Callable[[], None] | None = field(default=None, kw_only=True)
    """Writes the trained model after the last update; called on every process."""
    result: Path | None = field(default=None, kw_only=True)
    """Folder that `write` creates last. If it is missing, a run that has completed all updates is
    reopened to write it."""
    notices: Sequence[Notice] = field(default=(), kw_only=True)
    """Logged before the first update of every launch."""
    progress: _Progress = field(factory=_Progress, init=False)
    already_done: bool = field(default=False, init=False)
    """True if an earlier launch completed all updates and wrote the model."""
    stop: StopRequest = field(factory=StopRequest, init=False)
    display: RunDisplay = field(init=False)
    uploads: CheckpointUploader | None = field(default=None, init=False)
    """Uploader to `checkpoint_store`, on rank 0 during the run."""
    damaged: Counter[int] = field(factory=Counter, init=False)
    """Number of damaged copies of each step that were found on resuming."""

    def __attrs_post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}; raise it")
        active = self.options.progress and not processes.rank()
        self.display = RunDisplay(total=self.steps, every=self.options.log_every, active=active)

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder."""
        return self.folder / "checkpoints"

    def run(self) -> Result:
        """Run the remaining updates and write the model; do nothing if both are done.

        Raises:
            ConfigError: a checkpoint is beyond `steps`.
            FolderError: the folder belongs to another run or is locked by one.
            CheckpointError: checkpoints belong to another run or cannot be written.
        """
        ownership = self.owner.lock_folder(self.folder)
        with ownership as changes, self._events() as emit, self.stop.listening():
            log = RunLog(event=emit, note=self.display.note)
            try:
                for change in changes:
                    log.note(f"changed: {change}")
                    emit("changed_setting", {"name": change.name, "change": str(change)})
                self._connect_store()
                self._resume(log)
                finished = self._train(log)
                if finished:
                    self._check_outcome()
                if finished and self.write is not None and not self.already_done:
                    self.write()
                # Last, so that the model is saved even if the store fails.
                self._finish_uploads(log)
            finally:
                self.display.close()
            emit(
                "end",
                {
                    "step": self.progress.step,
                    "finished": int(finished),
                    "skipped": self.progress.nonfinite,
                },
            )
        stopped_by = "" if finished else self.stop.signal_name
        progress = self.progress
        return Result(
            step=progress.step,
            seconds=progress.seconds,
            first=progress.first,
            last=progress.last,
            finished=finished,
            signal_name=stopped_by,
        )

    @contextmanager
    def _events(self) -> Iterator[OnEvent]:
        """Yield the event sink: the caller's or a JSON Lines file on rank 0, none elsewhere."""
        # Only rank 0 writes events.
        if processes.rank():
            yield lambda event, fields: None
        elif self.options.on_event is not None:
            yield self.options.on_event
        else:
            lines = JsonLines(self.folder / "events.jsonl")
            try:
                yield lines
            finally:
                lines.close()

    def _train(self, log: RunLog) -> bool:
        """Run updates until `steps` or a stop signal; return True if all are completed."""
        if self.already_done:
            return True
        throughput, skipped = Throughput(), 0
        log.event("begin", {"steps": self.steps, "step": self.progress.step})
        for notice in self.notices:
            log.event(notice.event, notice.fields)
            log.note(notice.line)
        if self.progress.step == 0:
            self._evaluate(log)
        # Collective: all ranks stop after the same step, no matter which rank got the signal.
        while self.progress.step < self.steps and not self.stop.agreed():
            start = monotonic()
            update, statistics = self.learner.update(log)
            self.progress.step += 1
            self.progress.seconds += monotonic() - start
            skipped = skipped + 1 if update.skipped else 0
            self.progress.nonfinite += update.skipped == "nonfinite"
            # A batch without targets has no loss.
            if update.skipped != "no_targets":
                self.progress.loss = update.loss
            throughput.count(update.tokens)
            self._log_step(update, statistics, throughput, log)
            self._report_uploads(log)
            # Raises after too many skipped updates in a row, before a checkpoint is saved.
            self._check_finite(update, skipped, log)
            start = monotonic()
            last = self.progress.step == self.steps
            if last or _due(self.progress.step, self.options.eval_every):
                self._evaluate(log)
            if last or _due(self.progress.step, self.options.checkpoint_every):
                self._save(log)
            # Evaluation and checkpoints are not training time.
            throughput.pause(monotonic() - start)
        finished = self.progress.step == self.steps
        if not finished:
            self._save(log)
            log.note(
                f"stopped by {self.stop.signal_name or 'a signal'} at step {self.progress.step} of "
                f"{self.steps}; a checkpoint is saved, the same command resumes"
            )
        else:
            log.note(f"completed {self.steps} steps in {duration(self.progress.seconds)}")
        return finished

    def _log_step(
        self,
        update: StepReport,
        statistics: Mapping[str, float],
        throughput: Throughput,
        log: RunLog,
    ) -> None:
        metrics = {"loss": update.loss, **statistics}
        shown = dict(list(metrics.items())[:METRICS_PER_LINE])
        self.display.show_step(self.progress.step, shown, throughput)
        log.event(
            "step",
            {
                "step": self.progress.step,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": update.tokens,
                "rate_tokens_per_s": round(throughput.rate_tokens_per_s, 1),
                **metrics,
            },
        )

    def _check_finite(self, update: StepReport, skipped: int, log: RunLog) -> None:
        if skipped:
            log.event("skipped", {"step": self.progress.step, "reason": str(update.skipped)})
            reason = SKIP_REASONS[update.skipped or "nonfinite"]
            if processes.rank() == 0:
                logger.warning("step %d: %s; the update is skipped", self.progress.step, reason)
        if skipped == MAX_CONSECUTIVE_SKIPS:
            raise NonFiniteError(
                f"{skipped} updates in a row were skipped (loss {update.loss}); lower "
                "learning_rate or check the data, and restart from an earlier checkpoint"
            )

    def _check_outcome(self) -> None:
        """Check that the run has not diverged, before its result is written.

        Raises:
            NonFiniteError: the last loss or a held-out loss is not finite, or most updates were
                skipped.
        """
        progress = self.progress
        held_out = next(
            (
                name
                for name, value in progress.last.items()
                if "loss" in name and not _finite(value)
            ),
            None,
        )
        if 2 * progress.nonfinite > progress.step:
            problem = f"{progress.nonfinite} of {progress.step} updates were skipped as not finite"
        elif held_out is not None:
            problem = f"held-out {held_out} is not finite"
        elif progress.nonfinite and not _finite(progress.loss):
            problem = "the last loss is not finite"
        else:
            return
        raise NonFiniteError(
            f"step {progress.step}: {problem}, so no model is written; lower learning_rate or "
            "check the data, and restart in another output_dir"
        )

    def _evaluate(self, log: RunLog) -> None:
        step = self.progress.step
        # Also runs at step 0, before the first update, for `first`.
        metrics = dict(self.learner.evaluate(log))
        self.progress.last = metrics
        if step == 0:
            self.progress.first = metrics
        if metrics:
            line = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            log.note(f"held out at step {step}: {line}")
            log.event("evaluate", {"step": step, **metrics})

    def _save(self, log: RunLog) -> None:
        # All ranks take part: each writes its own shard.
        state, progress, start = self.learner.state(), self.progress, monotonic()
        facts = {
            "identity": self._identity(),
            "progress": asdict(progress),
            "learner": dict(state.facts),
        }
        folder = checkpoint.write(
            self.checkpoints, progress.step, State(tensors=state.tensors, facts=facts)
        )
        if self.uploads is not None:
            self.uploads.submit(folder)
        # Older checkpoints are deleted only once the new one is complete.
        pinned = self.uploads.pinned if self.uploads is not None else ()
        checkpoint.keep_last(self.checkpoints, self.options.keep_checkpoints, pinned=pinned)
        seconds = round(monotonic() - start, 3)
        log.event("checkpoint", {"step": progress.step, "folder": str(folder), "seconds": seconds})

    def _connect_store(self) -> None:
        """Create the uploader on rank 0 if `checkpoint_store` is set; collective."""
        url = self.options.checkpoint_store
        if url is None:
            return

        def connect() -> None:
            keep = self.options.keep_checkpoints
            self.uploads = CheckpointUploader(RunStore(url), keep=keep)

        self._on_rank_zero(connect)

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run an action with the store on rank 0; all ranks fail if it does."""
        problem: CheckpointError | None = None
        if processes.rank() == 0:
            try:
                action()
            except CheckpointError as error:
                problem = error
        if processes.any_of(problem is not None):
            raise problem or CheckpointError("rank 0 cannot use checkpoint_store; see its error")

    def _download_newer(self, log: RunLog) -> None:
        """Download the newest published checkpoint if it is newer than all local ones."""
        if self.options.checkpoint_store is None or not self.options.resume:
            return

        def download() -> None:
            assert self.uploads is not None
            store = self.uploads.store
            local = max(checkpoint.complete_steps(self.checkpoints), default=-1)
            # After two damaged copies of a step, older steps are tried.
            steps = [step for step in store.steps() if self.damaged[step] < 2]
            while steps and steps[-1] > local:
                step = steps.pop()
                log.note(f"downloading the checkpoint of step {step} from {store.url}")
                try:
                    store.download(self.checkpoints, step=step)
                except DamageError as damage:
                    logger.warning("%s", damage)
                    log.event("damaged_checkpoint", {"folder": store.url, "problem": str(damage)})
                    continue
                log.event("download", {"step": step, "store": store.url})
                return

        self._on_rank_zero(download)

    def _report_uploads(self, log: RunLog) -> None:
        """Log the uploads that have ended."""
        if self.uploads is not None:
            self.uploads.report(log.event)

    def _finish_uploads(self, log: RunLog) -> None:
        """Wait until the newest checkpoint is in the store; collective.

        Raises:
            CheckpointError: it could not be uploaded; it is complete on this machine.
        """
        if self.options.checkpoint_store is None:
            return

        def finish() -> None:
            assert self.uploads is not None
            self.uploads.wait()
            problem = self.uploads.last_problem
            self._report_uploads(log)
            if problem:
                raise CheckpointError(
                    f"{problem}; the checkpoint is complete in {self.checkpoints}, and the same"
                    " command uploads it"
                )

        self._on_rank_zero(finish)
        checkpoint.keep_last(self.checkpoints, self.options.keep_checkpoints)

    def _resume(self, log: RunLog) -> None:
        self._download_newer(log)
        for folder in checkpoint.incomplete(self.checkpoints):
            self._set_aside(folder, f"{folder} has no manifest", log)
        steps = checkpoint.complete_steps(self.checkpoints)
        if not steps:
            self._refuse_if_only_damaged()
            return
        if not self.options.resume:
            raise CheckpointError(
                f"{self.checkpoints} contains checkpoints and resume is off; set another "
                "output_dir or delete them"
            )
        folder = checkpoint.step_folder(self.checkpoints, steps[-1])
        state, problem = _read(folder)
        # All ranks must fall back to the same checkpoint, even if only one rank reads damage.
        if processes.any_of(state is None):
            self._set_aside(folder, problem or "damaged on another process", log)
            self._resume(log)
            return
        assert state is not None
        self._restore(folder, state)
        self._upload_if_unpublished(folder)
        if self.already_done:
            log.note(
                f"finished: all {self.steps} steps in {self.folder} are done and {self.result} is "
                "written; raise steps to continue"
            )
            return
        log.note(f"resuming from {folder} (step {self.progress.step} of {self.steps})")
        log.event("resume", {"step": self.progress.step, "checkpoint": str(folder)})

    def _upload_if_unpublished(self, folder: Path) -> None:
        """Upload the checkpoint that a killed process did not finish uploading; collective."""
        if self.options.checkpoint_store is None:
            return

        def upload() -> None:
            assert self.uploads is not None
            if self.progress.step not in self.uploads.store.steps():
                self.uploads.submit(folder)

        self._on_rank_zero(upload)

    def _identity(self) -> dict[str, str]:
        return {"kind": self.owner.command, **self.owner.identity}

    def _restore(self, folder: Path, state: State) -> None:
        saved, current = state.facts["identity"], self._identity()
        for name in current.keys() | saved.keys():
            if saved.get(name) != current.get(name):
                raise CheckpointError(
                    f"{folder} belongs to another run: its {name} is {saved.get(name)!r}, this "
                    f"run's is {current.get(name)!r}; set another output_dir"
                )
        progress = _Progress(**state.facts["progress"])
        if progress.step > self.steps:
            raise ConfigError(
                f"steps must be at least {progress.step}, the step of {folder}, got {self.steps}; "
                "raise steps or set another output_dir"
            )
        self.progress = progress
        # A run killed between its last checkpoint and its model is opened again to write the model.
        self.already_done = progress.step == self.steps and not self._result_is_missing()
        self.learner.load(State(tensors=state.tensors, facts=state.facts["learner"]))

    def _result_is_missing(self) -> bool:
        """Return True if the trained model is missing. Rank 0 decides, as it writes the model."""
        if self.result is None:
            return False
        return processes.any_of(processes.rank() == 0 and not self.result.exists())

    def _set_aside(self, folder: Path, problem: str, log: RunLog) -> None:
        self.damaged[int(folder.name.removeprefix("step-"))] += 1
        backup = folder.with_name(folder.name + ".damaged")
        if processes.rank() == 0:
            shutil.rmtree(backup, ignore_errors=True)
            folder.rename(backup)
        # No rank may look for checkpoints before the folder is renamed.
        processes.barrier()
        if processes.rank() == 0:
            logger.warning(
                "%s; renamed to %s, resuming from the checkpoint before it", problem, backup.name
            )
        log.event("damaged_checkpoint", {"folder": str(folder), "problem": problem})

    def _refuse_if_only_damaged(self) -> None:
        damaged = sorted(self.checkpoints.glob("*.damaged"))
        if damaged:
            raise CheckpointError(
                f"no complete checkpoint is left in {self.checkpoints}, {len(damaged)} are "
                "damaged; restore one, or delete them to restart from step 0"
            )


def _read(folder: Path) -> tuple[State | None, str]:
    """Read a checkpoint; return (state, "") or (None, the problem)."""
    try:
        return checkpoint.read(folder), ""
    except DamageError as damage:
        return None, str(damage)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _finite(value: float | None) -> bool:
    return value is not None and isfinite(value)

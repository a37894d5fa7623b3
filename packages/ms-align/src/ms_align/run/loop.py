"""The loop that every trainer runs in: update, log, evaluate, checkpoint, stop, go on.

A trainer hands over its `Learner`: what one update does, and all the state it needs to go on.
Whatever ends the process, the same call goes on from the last complete checkpoint, bit for bit.
"""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Protocol

from attrs import asdict, define, field, frozen
from torch import nn

from ms_align import processes
from ms_align.engines.protocol import StepReport
from ms_align.errors import CheckpointError, ConfigError, DamageError, NonFiniteError
from ms_align.events import JsonLines, OnEvent
from ms_align.processes import StopRequest
from ms_align.progress import RunDisplay, Throughput, duration
from ms_align.run import checkpoint
from ms_align.run.checkpoint import State
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership

logger = logging.getLogger(__name__)

SKIPPED_IN_A_ROW = 20
"""Updates in a row whose gradient was not finite, after which a run is lost."""
SKIPPED = {
    "no_targets": "nothing had a target",
    "nonfinite": "the gradient is not finite",
    "overflow": "the gradient did not fit into float16",
    "refused": "the update was refused",
}
"""Why an update was skipped, for people."""
SHOWN = 4
"""Metrics on a line of progress, the loss included."""


@frozen(kw_only=True)
class RunLog:
    """Where a learner logs what happens inside of it."""

    event: OnEvent
    note: Callable[[str], None]
    """Shows a line to whoever watches."""


@frozen(kw_only=True)
class Notice:
    """A fact about a run that is logged before its first update, as an event and as a line."""

    kind: str
    """Kind of the event."""
    fields: Mapping[str, int | float | str]
    line: str


class Learner(Protocol):
    """What a trainer gives the loop."""

    def update(self, log: RunLog) -> tuple[StepReport, Mapping[str, float]]:
        """Update the weights once, with whatever must come before it; return it and what to log."""

    def evaluate(self, log: RunLog) -> Mapping[str, float]:
        """Compute held-out metrics by name, and log samples; empty where nothing is held out."""

    def state(self) -> State:
        """Return all that it needs to go on exactly from here."""

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""


@frozen(kw_only=True)
class Result:
    """What a run has come to."""

    step: int
    """Updates made, over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command resumes."""
    first: Mapping[str, float]
    """Held-out metrics before the first update."""
    last: Mapping[str, float]
    """Held-out metrics at the end."""
    seconds: float
    """Time in updates, over all launches."""
    signal_name: str = ""
    """The signal that stopped this launch, such as `SIGINT`."""
    model: nn.Module | None = None
    """The trained model, where this process holds it."""


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
    """Runs a learner for so many updates."""

    learner: Learner
    steps: int = field(kw_only=True)
    """Updates of the whole run, over all launches."""
    options: RunOptions = field(kw_only=True)
    """How to go on, show and keep."""
    folder: Path = field(kw_only=True)
    """The run's folder, which nobody else may work in."""
    owner: Ownership = field(kw_only=True)
    """What makes a run another run, which the folder and its checkpoints are refused to."""
    write: Callable[[], None] | None = field(default=None, kw_only=True)
    """Writes what the run is for, when all updates are made; called on every process."""
    result: Path | None = field(default=None, kw_only=True)
    """The folder that `write` writes last. While it is not there, a run whose updates are all made
    is taken up once more, to be written."""
    notices: Sequence[Notice] = field(default=(), kw_only=True)
    """Logged before the first update of each launch."""
    at: _Progress = field(factory=_Progress, init=False)
    done_before: bool = field(default=False, init=False)
    """All updates were made and written when the run was called."""
    stop: StopRequest = field(factory=StopRequest, init=False)
    show: RunDisplay = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(
                f"steps is {self.steps}; give at least 1, or nothing would be learned"
            )
        active = self.options.progress and not processes.rank()
        self.show = RunDisplay(total=self.steps, every=self.options.log_every, active=active)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def run(self) -> Result:
        """Make all updates that are left, and write the result; where all is done, do nothing.

        Raises:
            ConfigError: more updates are made than `steps`.
            FolderError: the folder is another run's, or is being written by one.
            CheckpointError: checkpoints are of another run or cannot be written.
        """
        held = self.owner.hold(self.folder)
        with held as changes, self._events() as emit, self.stop.listening():
            log = RunLog(event=emit, note=self.show.note)
            try:
                for change in changes:
                    log.note(f"changed: {change}")
                    emit("changed_setting", {"name": change.name, "change": str(change)})
                self._resume(log)
                finished = self._go(log)
                if finished:
                    self._check_outcome()
                if finished and self.write is not None and not self.done_before:
                    self.write()
            finally:
                self.show.close()
            emit(
                "end",
                {"step": self.at.step, "finished": int(finished), "skipped": self.at.nonfinite},
            )
        stopped_by = "" if finished else self.stop.signal_name
        at = self.at
        return Result(
            step=at.step,
            seconds=at.seconds,
            first=at.first,
            last=at.last,
            finished=finished,
            signal_name=stopped_by,
        )

    @contextmanager
    def _events(self) -> Iterator[OnEvent]:
        """Yield the first process's callable, and one that does nothing elsewhere."""
        if processes.rank():
            yield lambda kind, fields: None
        elif self.options.on_event is not None:
            yield self.options.on_event
        else:
            lines = JsonLines(self.folder / "events.jsonl")
            try:
                yield lines
            finally:
                lines.close()

    def _go(self, log: RunLog) -> bool:
        if self.done_before:
            return True
        throughput, skipped = Throughput(), 0
        log.event("begin", {"steps": self.steps, "step": self.at.step})
        for notice in self.notices:
            log.event(notice.kind, notice.fields)
            log.note(notice.line)
        if self.at.step == 0:
            self._evaluate(log)
        while self.at.step < self.steps and not self.stop.agreed():
            began = monotonic()
            update, statistics = self.learner.update(log)
            self.at.step += 1
            self.at.seconds += monotonic() - began
            skipped = skipped + 1 if update.skipped else 0
            self.at.nonfinite += update.skipped == "nonfinite"
            if update.skipped != "no_targets":
                self.at.loss = update.loss
            throughput.count(update.tokens)
            self._log_step(update, statistics, throughput, log)
            self._check_finite(update, skipped)
            began = monotonic()
            last = self.at.step == self.steps
            if last or _due(self.at.step, self.options.evaluate_every):
                self._evaluate(log)
            if last or _due(self.at.step, self.options.checkpoint_every):
                self._save(log)
            throughput.pause(monotonic() - began)
        finished = self.at.step == self.steps
        if not finished:
            self._save(log)
            log.note(
                f"stopped by {self.stop.signal_name or 'a signal'} at step {self.at.step} of "
                f"{self.steps}; a checkpoint is saved, the same command resumes"
            )
        else:
            log.note(f"made {self.steps} steps in {duration(self.at.seconds)}")
        return finished

    def _log_step(
        self,
        update: StepReport,
        statistics: Mapping[str, float],
        throughput: Throughput,
        log: RunLog,
    ) -> None:
        facts = {"loss": update.loss, **statistics}
        shown = dict(list(facts.items())[:SHOWN])
        self.show.show_step(self.at.step, shown, throughput)
        log.event(
            "step",
            {
                "step": self.at.step,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": update.tokens,
                "rate_tokens_per_s": round(throughput.rate_tokens_per_s, 1),
                **facts,
            },
        )

    def _check_finite(self, update: StepReport, skipped: int) -> None:
        if skipped:
            why = SKIPPED[update.skipped or "nonfinite"]
            if processes.rank() == 0:
                logger.warning("step %d: %s; the update is skipped", self.at.step, why)
        if skipped == SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{skipped} updates in a row were skipped (loss {update.loss}); lower "
                "learning_rate, or look at the data, and start from an earlier checkpoint"
            )

    def _check_outcome(self) -> None:
        """Refuse to write the result of a run that diverged.

        Raises:
            NonFiniteError: the last loss or a held-out loss is not finite, or most updates were
                skipped.
        """
        at = self.at
        held_out = next(
            (name for name, value in at.last.items() if "loss" in name and not _finite(value)), None
        )
        if 2 * at.nonfinite > at.step:
            problem = f"{at.nonfinite} of {at.step} updates were skipped as not finite"
        elif held_out is not None:
            problem = f"held-out {held_out} is not finite"
        elif at.nonfinite and not _finite(at.loss):
            problem = "the last loss is not finite"
        else:
            return
        raise NonFiniteError(
            f"step {at.step}: {problem}, so no model is written; lower learning_rate and restart in"
            " another output_dir, or look at the data"
        )

    def _evaluate(self, log: RunLog) -> None:
        step = self.at.step
        metrics = dict(self.learner.evaluate(log))
        self.at.last = metrics
        if step == 0:
            self.at.first = metrics
        if metrics:
            line = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            log.note(f"held out at step {step}: {line}")
            log.event("evaluate", {"step": step, **metrics})

    def _save(self, log: RunLog) -> None:
        state, done, began = self.learner.state(), self.at, monotonic()
        facts = {
            "identity": self._identity(),
            "progress": asdict(done),
            "learner": dict(state.facts),
        }
        folder = checkpoint.write(
            self.checkpoints, done.step, State(tensors=state.tensors, facts=facts)
        )
        checkpoint.keep_last(self.checkpoints, self.options.keep_checkpoints)
        seconds = round(monotonic() - began, 3)
        log.event("checkpoint", {"step": done.step, "folder": str(folder), "seconds": seconds})

    def _resume(self, log: RunLog) -> None:
        for folder in checkpoint.incomplete(self.checkpoints):
            self._set_aside(folder, f"{folder} has no manifest", log)
        steps = checkpoint.complete_steps(self.checkpoints)
        if not steps:
            self._refuse_if_only_damaged()
            return
        if not self.options.resume:
            raise CheckpointError(
                f"{self.checkpoints} holds checkpoints and resume is off; choose another "
                "output_dir, or delete them"
            )
        folder = checkpoint.step_folder(self.checkpoints, steps[-1])
        state, damage = _read(folder)
        if processes.any_of(state is None):
            self._set_aside(folder, damage or "damaged on another process", log)
            self._resume(log)
            return
        assert state is not None
        self._take(folder, state)
        if self.done_before:
            log.note(
                f"finished: the {self.steps} steps of {self.folder} are made and {self.result} is "
                "written; raise steps to go on"
            )
            return
        log.note(f"resuming from {folder} (step {self.at.step} of {self.steps})")
        log.event("resume", {"step": self.at.step, "checkpoint": str(folder)})

    def _identity(self) -> dict[str, str]:
        return {"kind": self.owner.kind, **self.owner.identity}

    def _take(self, folder: Path, state: State) -> None:
        kept, own = state.facts["identity"], self._identity()
        for name in own.keys() | kept.keys():
            if kept.get(name) != own.get(name):
                raise CheckpointError(
                    f"{folder} is of another run: {name} was {kept.get(name)!r} and is "
                    f"{own.get(name)!r}; choose another output_dir"
                )
        at = _Progress(**state.facts["progress"])
        if at.step > self.steps:
            raise ConfigError(
                f"{folder} is at step {at.step} and steps is {self.steps}, so nothing would "
                "be trained; raise steps, or choose another output_dir"
            )
        self.at = at
        self.done_before = at.step == self.steps and not self._is_unwritten()
        self.learner.load(State(tensors=state.tensors, facts=state.facts["learner"]))

    def _is_unwritten(self) -> bool:
        """Return whether the run's result is missing; the first process writes it, and says so."""
        if self.result is None:
            return False
        return processes.any_of(processes.rank() == 0 and not self.result.exists())

    def _set_aside(self, folder: Path, damage: str, log: RunLog) -> None:
        aside = folder.with_name(folder.name + ".damaged")
        if processes.rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        processes.barrier()
        if processes.rank() == 0:
            logger.warning(
                "%s; kept as %s, resuming from the checkpoint before it", damage, aside.name
            )
        log.event("damaged_checkpoint", {"folder": str(folder), "problem": damage})

    def _refuse_if_only_damaged(self) -> None:
        damaged = sorted(self.checkpoints.glob("*.damaged"))
        if damaged:
            raise CheckpointError(
                f"no whole checkpoint is left in {self.checkpoints}, {len(damaged)} are damaged; "
                "restore one, or delete them to start from the beginning"
            )


def _read(folder: Path) -> tuple[State | None, str]:
    """Read the checkpoint; or return None, and what is damaged."""
    try:
        return checkpoint.read(folder), ""
    except DamageError as damage:
        return None, str(damage)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _finite(value: float | None) -> bool:
    return value is not None and isfinite(value)

"""The loop that every trainer runs in: update, tell, evaluate, keep, stop, go on.

A trainer hands over its `Work`: what one update does, and all the state it would need to go on.
Whatever ends the process, the same call goes on from the last complete checkpoint, bit for bit.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Protocol

from attrs import define, field, frozen

from ms_align import processes
from ms_align.engines.protocol import Update
from ms_align.errors import CheckpointError, ConfigError, DamageError, NonFiniteError
from ms_align.events import Fields, JsonLines, OnEvent
from ms_align.processes import StopRequest
from ms_align.progress import RunDisplay, Throughput, duration
from ms_align.run import checkpoint
from ms_align.run.checkpoint import State
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership

__all__ = ["Loop", "Result", "Tell", "Work"]

SKIPPED_IN_A_ROW = 20
"""Updates in a row whose gradient was not finite, after which a run is lost."""
SHOWN = 4
"""Figures on a line of progress, the loss included."""


@frozen(kw_only=True)
class Tell:
    """How work tells what happens inside of it."""

    event: OnEvent
    note: "Note"


class Note(Protocol):
    """Shows a line to whoever watches."""

    def __call__(self, text: str, /) -> None:
        """RunDisplay it."""


class Work(Protocol):
    """What a trainer gives the loop."""

    def update(self, tell: Tell) -> Update:
        """One update of the weights, with whatever must come before it."""

    def evaluate(self, tell: Tell) -> Mapping[str, float]:
        """Held-out figures by name, and samples told; empty where nothing is held out."""

    def state(self) -> State:
        """All it needs to go on exactly from here."""

    def load(self, state: State) -> None:
        """Go to where `state` was taken."""


@frozen(kw_only=True)
class Result:
    """What a run has come to."""

    step: int
    """Updates made, over all launches."""
    finished: bool
    """False if a signal stopped the run; the same command goes on."""
    first: Mapping[str, float]
    """Held-out figures before the first update."""
    last: Mapping[str, float]
    """Held-out figures at the end."""
    seconds: float
    """Time in updates, over all launches."""
    signal_name: str = ""
    """The signal that stopped this launch, such as `SIGINT`."""


@define(kw_only=True)
class _Standing:
    step: int = 0
    seconds: float = 0.0
    first: dict[str, float] = field(factory=dict)
    last: dict[str, float] = field(factory=dict)
    evaluated: int = -1


class Loop:
    """Runs some work for so many updates.

    Args:
        work: what to do.
        steps: updates of the whole run, over all launches.
        options: how to go on, show and keep.
        folder: of the run, which nobody else may work in.
        owner: what makes a run another run, which the folder and its checkpoints are refused to.
        write: writes what the run is for, when all updates are made; called on every process.
        result: the folder that `write` writes last. While it is not there, a run whose updates are
            all made is taken up once more, to be written.
    """

    def __init__(
        self,
        work: Work,
        *,
        steps: int,
        options: RunOptions,
        folder: Path,
        owner: Ownership,
        write: Callable[[], None] | None = None,
        result: Path | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps is {steps}; give at least 1, or nothing would be learned")
        self.work = work
        self.steps = steps
        self.options = options
        self.folder = folder
        self.owner = owner
        self.write = write
        self.result = result
        self.standing = _Standing()
        self.done_before = False
        """All updates were made and written when the run was called."""
        self.stop = StopRequest()
        self.show = RunDisplay(
            total=steps, every=options.log_every, active=options.progress and not processes.rank()
        )

    @property
    def checkpoints(self) -> Path:
        """Where they lie."""
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
            tell = Tell(event=emit, note=self.show.note)
            try:
                for change in changes:
                    tell.note(f"changed: {change}")
                    emit("changed_setting", {"name": change.name, "told": str(change)})
                self._resume(tell)
                finished = self._go(tell)
                if finished and self.write is not None and not self.done_before:
                    self.write()
            finally:
                self.show.close()
            emit("end", {"step": self.standing.step, "finished": int(finished)})
        done = self.standing
        return Result(
            step=done.step,
            finished=finished,
            first=done.first,
            last=done.last,
            seconds=done.seconds,
            signal_name="" if finished else self.stop.signal_name,
        )

    @contextmanager
    def _events(self) -> Iterator[OnEvent]:
        """The first process's callable, and one that does nothing elsewhere."""
        if processes.rank():
            yield _silent
        elif self.options.on_event is not None:
            yield self.options.on_event
        else:
            lines = JsonLines(self.folder / "events.jsonl")
            try:
                yield lines
            finally:
                lines.close()

    def _go(self, tell: Tell) -> bool:
        if self.done_before:
            return True
        pace, skipped = Throughput(), 0
        tell.event("begin", {"steps": self.steps, "step": self.standing.step})
        if self.standing.step == 0:
            self._evaluate(tell)
        while self.standing.step < self.steps and not self.stop.agreed():
            began = monotonic()
            update = self.work.update(tell)
            self.standing.step += 1
            self.standing.seconds += monotonic() - began
            skipped = skipped + 1 if update.skipped else 0
            pace.step(update.tokens)
            self._tell_step(update, pace, tell)
            self._check_finite(update, skipped)
            began = monotonic()
            last = self.standing.step == self.steps
            if last or _due(self.standing.step, self.options.evaluate_every):
                self._evaluate(tell)
            if last or _due(self.standing.step, self.options.checkpoint_every):
                self._save(tell)
            pace.pause(monotonic() - began)
        finished = self.standing.step == self.steps
        if not finished:
            self._save(tell)
            tell.note(
                f"stopped by {self.stop.signal_name or 'a signal'} at step {self.standing.step} of "
                f"{self.steps}; a checkpoint is saved, the same command goes on"
            )
        else:
            tell.note(f"made {self.steps} steps in {duration(self.standing.seconds)}")
        return finished

    def _tell_step(self, update: Update, pace: Throughput, tell: Tell) -> None:
        facts = {"loss": update.loss, **update.statistics}
        shown = dict(list(facts.items())[:SHOWN])
        self.show.step(self.standing.step, shown, pace)
        tell.event(
            "step",
            {
                "step": self.standing.step,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": update.tokens,
                "rate_tokens_per_s": round(pace.rate_tokens_per_s, 1),
                **facts,
            },
        )

    def _check_finite(self, update: Update, skipped: int) -> None:
        if skipped:
            self.show.note(
                f"step {self.standing.step}: the gradient is not finite or nothing had a loss; "
                "the update is skipped"
            )
        if skipped == SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{skipped} updates in a row were skipped (loss {update.loss}); lower "
                "learning_rate, or look at the data, and start from an earlier checkpoint"
            )

    def _evaluate(self, tell: Tell) -> None:
        step = self.standing.step
        figures = dict(self.work.evaluate(tell))
        self.standing.last, self.standing.evaluated = figures, step
        if step == 0:
            self.standing.first = figures
        if figures:
            told = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
            tell.note(f"held out at step {step}: {told}")
            tell.event("evaluate", {"step": step, **figures})

    def _save(self, tell: Tell) -> None:
        state, done, began = self.work.state(), self.standing, monotonic()
        facts = {
            "identity": self._identity(),
            "standing": {
                "step": done.step,
                "seconds": done.seconds,
                "first": done.first,
                "last": done.last,
                "evaluated": done.evaluated,
            },
            "work": dict(state.facts),
        }
        folder = checkpoint.write(
            self.checkpoints, done.step, State(tensors=state.tensors, facts=facts)
        )
        checkpoint.keep_last(self.checkpoints, self.options.keep_checkpoints)
        seconds = round(monotonic() - began, 3)
        tell.event("checkpoint", {"step": done.step, "folder": str(folder), "seconds": seconds})

    def _resume(self, tell: Tell) -> None:
        for folder in checkpoint.incomplete(self.checkpoints):
            self._set_aside(folder, f"{folder} has no manifest", tell)
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
            self._set_aside(folder, damage or "damaged on another process", tell)
            self._resume(tell)
            return
        assert state is not None
        self._take(folder, state)
        if self.done_before:
            tell.note(
                f"finished: the {self.steps} steps of {self.folder} are made and {self.result} is "
                "written; raise steps to go on"
            )
            return
        tell.note(f"goes on from {folder} (step {self.standing.step} of {self.steps})")
        tell.event("resume", {"step": self.standing.step, "checkpoint": str(folder)})

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
        standing = _Standing(**state.facts["standing"])
        if standing.step > self.steps:
            raise ConfigError(
                f"{folder} is at step {standing.step} and steps is {self.steps}, so nothing would "
                "be trained; raise steps, or choose another output_dir"
            )
        self.standing = standing
        self.done_before = standing.step == self.steps and not self._is_unwritten()
        self.work.load(State(tensors=state.tensors, facts=state.facts["work"]))

    def _is_unwritten(self) -> bool:
        """Whether what the run is for is missing; the first process writes, and tells."""
        if self.result is None:
            return False
        return processes.any_of(processes.rank() == 0 and not self.result.exists())

    def _set_aside(self, folder: Path, damage: str, tell: Tell) -> None:
        aside = folder.with_name(folder.name + ".damaged")
        if processes.rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        processes.barrier()
        tell.note(f"warning: {damage}; kept as {aside.name}, the one before it is taken")
        tell.event("damaged_checkpoint", {"folder": str(folder), "problem": damage})

    def _refuse_if_only_damaged(self) -> None:
        damaged = sorted(self.checkpoints.glob("*.damaged"))
        if damaged:
            raise CheckpointError(
                f"no whole checkpoint is left in {self.checkpoints}, {len(damaged)} are damaged; "
                "restore one, or delete them to start from the beginning"
            )


def _read(folder: Path) -> tuple[State | None, str]:
    """The checkpoint; or None, and what is damaged."""
    try:
        return checkpoint.read(folder), ""
    except DamageError as damage:
        return None, str(damage)


def _silent(kind: str, fields: Fields) -> None:
    """Takes an event and tells nobody."""


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

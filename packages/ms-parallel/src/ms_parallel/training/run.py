"""Runs the steps, evaluations and checkpoints of a run from its last checkpoint on."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import msgspec
import torch
from attrs import asdict, field, frozen

from ms_parallel import checkpoint
from ms_parallel.checkpoint.manifest import MANIFEST
from ms_parallel.cluster.agreement import StopRequest, first_does
from ms_parallel.cluster.watch import position
from ms_parallel.engine.balance.balancer import ExpertLoad
from ms_parallel.engine.engine import Engine, Update
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.errors import CheckpointError, DamageError, ParallelError
from ms_parallel.events import OnEvent
from ms_parallel.files.untrusted import decoding
from ms_parallel.pipeline.gathering import recorded_step
from ms_parallel.pipeline.step_file import write_step
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.progress import RunDisplay, Throughput
from ms_parallel.split.context.splitter import ContextLoad
from ms_parallel.training.held_out import HeldOut
from ms_parallel.training.options import Options

SKIPPED_IN_A_ROW = 20
"""Updates in a row whose gradient was not finite, after which a run is lost."""
logger = logging.getLogger(__name__)


class Stream(Protocol):
    """Batches, and a place among them that can be kept."""

    def __next__(self) -> Mapping[str, Any]:
        """This data rank's rows of the next global batch."""

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain JSON; the same on every rank."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go to where `state` was taken."""


class Standing(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How far a run has come; goes into each checkpoint."""

    loss: float | None = None
    """Loss of the last step's batch; None before the first, and where it is not finite."""
    tokens: int = 0
    """Tokens trained on."""
    seconds: float = 0.0
    """Time in steps, over all launches."""
    first_held_out_loss: float | None = None
    """Loss on held-out text before the first step."""
    held_out_loss: float | None = None
    """Loss on held-out text at the last evaluation."""
    held_out_step: int | None = None


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each checkpoint of a run holds beside its tensors."""

    model: dict[str, Any]
    layout: str
    stream: dict[str, Any]
    standing: Standing


@frozen(kw_only=True)
class Run:
    """What `train` has put together, and the loop over it."""

    engine: Engine
    stream: Stream
    held_out: HeldOut | None
    total: int
    """Steps of the whole run."""
    options: Options
    show: RunDisplay
    emit: OnEvent
    found: FoundSchedule | None = None
    """The schedule that was searched for this run."""
    standing: Standing = field(factory=Standing)
    stop: StopRequest = field(factory=StopRequest)

    @property
    def checkpoints(self) -> Path:
        """Where they lie."""
        return self.options.output_dir / "checkpoints"

    def note_changes(self, changes: Sequence[str]) -> None:
        """Say which settings are not what they were when the run was last begun."""
        for change in changes:
            self.show.note(f"changed: {change}")
            self.emit("changed_setting", {"setting": change})

    def resume(self) -> None:
        """Take over the last checkpoint that is whole, if there is one.

        A damaged one is set aside with a warning, and the one before is taken: the steps in
        between are made again, exactly as they were.

        Raises:
            CheckpointError: it is of another model, all are damaged, or `resume` is False.
        """
        while found := first_does(self._last_whole):
            folder, manifest = found
            try:
                self._take(folder, manifest)
            except DamageError as error:
                self._pass_over(manifest.step, error)
                continue
            if self.engine.step < self.total:
                self.show.note(f"goes on from {folder} (step {self.engine.step} of {self.total})")
            self.emit("resume", {"step": self.engine.step, "checkpoint": str(folder)})
            return

    def _last_whole(self) -> tuple[Path, checkpoint.Manifest] | None:
        checkpoint.sweep(self.checkpoints)
        steps = checkpoint.all_steps(self.checkpoints)
        if steps and not self.options.resume:
            raise CheckpointError(
                f"{self.checkpoints} holds checkpoints and resume is off; choose another"
                " output_dir, or delete them"
            )
        for step in reversed(steps):
            folder = checkpoint.step_folder(self.checkpoints, step)
            try:
                manifest = checkpoint.read_manifest(folder)
                facts_of(folder, manifest)
                return folder, manifest
            except DamageError as damage:
                self._set_aside(step, damage)
        if checkpoint.was_begun(self.checkpoints):
            damaged = len(list(self.checkpoints.glob("*.damaged-*")))
            raise CheckpointError(
                f"no whole checkpoint is left in {self.checkpoints}, {damaged} are damaged;"
                f" restore one, or move {self.checkpoints} away to start from the beginning"
            )
        return None

    def _pass_over(self, step: int, damage: DamageError) -> None:
        first_does(lambda: self._set_aside(step, damage))

    def _set_aside(self, step: int, damage: DamageError) -> None:
        aside = checkpoint.set_aside(self.checkpoints, step)
        self.show.note(f"warning: {damage}; kept as {aside.name}, the one before it is taken")
        self.emit("damaged_checkpoint", {"step": step, "problem": str(damage)})

    def _take(self, folder: Path, manifest: checkpoint.Manifest) -> None:
        facts = facts_of(folder, manifest)
        self._check_model(folder, facts.model)
        state = self.engine.state_dict()
        checkpoint.load(folder, manifest, state)
        self.engine.load_state_dict(state)
        self.stream.load_state_dict(facts.stream)
        for name in Standing.__struct_fields__:
            setattr(self.standing, name, getattr(facts.standing, name))

    def _check_model(self, folder: Path, there: Mapping[str, Any]) -> None:
        here = model_facts(self.engine)
        named = {name for name in here.keys() | there.keys() if not name.endswith("_token_id")}
        for name in sorted(named):
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"{folder} is a checkpoint of another model: {name} is {there.get(name)!r}"
                    f" there and {here.get(name)!r} here; choose another output_dir"
                )

    def go(self) -> bool:
        """Make the steps that are left.

        Returns:
            False if a signal asked to stop before the last; a checkpoint of that step is written.
        """
        options, pace, skipped = self.options, Throughput(), 0
        if self.engine.step == 0:
            self.evaluate()
        with self.stop.listening():
            while self.engine.step < self.total:
                update = self._step(pace)
                skipped = skipped + 1 if update.skipped == "nonfinite" else 0
                self._check_finite(update, skipped)
                step, began = self.engine.step, monotonic()
                last = step == self.total
                if last or _due(step, options.evaluate_every):
                    self.evaluate()
                stopped = self.stop.agreed() and not last
                if last or stopped or _due(step, options.checkpoint_every):
                    self.save()
                if stopped:
                    return False
                pace.pause(monotonic() - began)
        return True

    def _step(self, pace: Throughput) -> Update:
        began = monotonic()
        position.step, position.activity = self.engine.step + 1, "update"
        # Random numbers follow from seed and step, so that a checkpoint need not hold their state.
        torch.manual_seed((self.options.seed * 1_000_003 + self.engine.step) % 2**63)
        update = self._update(next(self.stream))
        pace.step(update.tokens)
        standing, step = self.standing, self.engine.step
        standing.loss = update.loss
        standing.tokens += update.tokens
        standing.seconds += monotonic() - began
        self.show.step(step, {"loss": update.loss}, pace)
        self.emit(
            "step",
            {
                "step": step,
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": update.tokens,
                "rate_tokens_per_s": round(pace.rate_tokens_per_s, 1),
                **{f"mtp_loss.{depth}": each for depth, each in enumerate(update.mtp_losses, 1)},
            },
        )
        self._emit_load(update.experts)
        self._emit_context(update.context)
        return update

    def _emit_context(self, load: ContextLoad | None) -> None:
        """Tell how evenly context ranks shared out attention, with every line of progress."""
        step = self.engine.step
        if load is not None and (_due(step, self.options.log_every) or step == self.total):
            self.emit("context", {"step": step, **asdict(load)})

    def _emit_load(self, load: ExpertLoad | None) -> None:
        """Tell how tokens were shared out over experts, with every line of progress."""
        step = self.engine.step
        if load is None or not (_due(step, self.options.log_every) or step == self.total):
            return
        self.emit(
            "experts",
            {
                "step": step,
                "balance_loss": load.balance_loss,
                "z_loss": load.z_loss,
                "entropy": sum(load.entropy) / len(load.entropy),
                "highest_load": load.highest_load,
                "highest_rank_load": load.highest_rank_load,
                "dropped_share": load.dropped_share,
                **load.by_layer,
            },
        )

    def _update(self, batch: Mapping[str, Any]) -> Update:
        """One update, recorded if it is due."""
        loss = NextTokenLoss(self.options.mtp_weight, self.options.z_coefficient)
        if not _due(self.engine.step + 1, self.options.record_every):
            return self.engine.update(batch, loss)
        step = self.engine.step
        update, recorder = self.engine.recorded_update(batch, loss)
        recorded = recorded_step(recorder, self.engine.groups, step)
        if recorded is not None:
            name = f"step-{self.engine.step:08}.json"
            path = self.options.output_dir / "timelines" / name
            first_does(lambda: write_step(path, recorded))
        return update

    def _check_finite(self, update: Update, skipped: int) -> None:
        if update.skipped == "no_targets":
            self.show.note(f"step {self.engine.step}: nothing had a loss; step skipped")
        elif update.skipped:
            self.show.note(f"step {self.engine.step}: gradient is not finite; step skipped")
        if skipped == SKIPPED_IN_A_ROW:
            raise ParallelError(
                f"{skipped} steps in a row had a gradient that is not finite (loss {update.loss});"
                " lower learning_rate and start from an earlier checkpoint"
            )

    def evaluate(self) -> float | None:
        """Measure, log and keep the held-out loss; None without held-out text."""
        if self.held_out is None:
            return None
        position.activity = "held-out evaluation"
        loss, step = self.held_out.loss(self.engine.evaluate), self.engine.step
        self.standing.held_out_loss, self.standing.held_out_step = loss, step
        if step == 0:
            self.standing.first_held_out_loss = loss
        self.show.note(f"held-out loss {loss:.4f} at step {step}")
        self.emit("evaluate", {"step": step, "held_out_loss": loss})
        return loss

    def mark(self) -> bytes:
        """What the model that a finished run writes is of: its step and that step's checkpoint."""
        manifest = checkpoint.step_folder(self.checkpoints, self.engine.step) / MANIFEST
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        return msgspec.json.encode({"step": self.engine.step, "checkpoint": digest})

    def save(self) -> Path:
        """Write a checkpoint of this step and let the oldest go.

        Raises:
            CheckpointError: it cannot be written; those before it are whole.
        """
        step, began = self.engine.step, monotonic()
        position.activity = "checkpoint"
        folder = checkpoint.step_folder(self.checkpoints, step)
        facts = {
            "model": model_facts(self.engine),
            "layout": str(self.engine.groups.layout),
            "stream": self.stream.state_dict(),
            "standing": msgspec.to_builtins(self.standing),
        }
        checkpoint.save(folder, self.engine.state_dict(), step=step, facts=facts)
        first_does(lambda: self._settle(step))
        seconds = round(monotonic() - began, 3)
        self.emit("checkpoint", {"step": step, "folder": str(folder), "seconds": seconds})
        return folder

    def _settle(self, step: int) -> None:
        checkpoint.note_last(self.checkpoints, step)
        checkpoint.keep_last(self.checkpoints, self.options.keep_checkpoints)


def facts_of(folder: Path, manifest: checkpoint.Manifest) -> RunFacts:
    """What a run has kept in a checkpoint beside its tensors.

    Raises:
        DamageError: it is not what a run keeps.
    """
    with decoding(folder / MANIFEST, error=DamageError):
        return msgspec.convert(manifest.facts, RunFacts)


def model_facts(engine: Engine) -> dict[str, Any]:
    """What makes a model another model, as JSON gives it back; no weight depends on its tokens."""
    facts = asdict(engine.config)
    return {
        name: list(v) if isinstance(v, tuple) else v
        for name, v in facts.items()
        if not name.endswith("_token_id")
    }


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

"""Runs the steps and evaluations of a run from its last checkpoint on."""

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import torch
from attrs import evolve, field, frozen

from ms_parallel.cluster.agreement import StopRequest, first_does
from ms_parallel.cluster.watch import position
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.updates.stopwatch import Stopwatch
from ms_parallel.engine.updates.update import Update
from ms_parallel.errors import DivergenceError
from ms_parallel.events import OnEvent
from ms_parallel.pipeline.gathering import recorded_step
from ms_parallel.pipeline.step_file import write_step
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.progress import RunDisplay, Throughput
from ms_parallel.training.course.checkpoints import RunCheckpoints, Standing, Stream
from ms_parallel.training.course.policy import Policy, check_lost, reason
from ms_parallel.training.course.telling import Telling
from ms_parallel.training.held_out import HeldOut
from ms_parallel.training.options import Options
from ms_parallel.training.shares.row_shares import RowShares


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
    telling: Telling
    checkpoints: RunCheckpoints
    standing: Standing
    shares: RowShares
    found: FoundSchedule | None = None
    """The schedule that was searched for this run."""
    stop: StopRequest = field(factory=StopRequest)

    @property
    def policy(self) -> Policy:
        """What is done about updates that are not as they should be."""
        options = self.options
        return Policy(
            on_nonfinite=options.on_nonfinite,
            on_spike=options.on_spike,
            factor=options.spike_factor,
            window=options.spike_window,
        )

    def note_changes(self, changes: Sequence[str]) -> None:
        """Say which settings are not what they were when the run was last begun."""
        for change in changes:
            self.show.note(f"changed: {change}")
            self.emit("changed_setting", {"setting": change})

    def go(self) -> bool:
        """Make the steps that are left.

        Returns:
            False if a signal asked to stop before the last; a checkpoint of that step is written.
        """
        options, pace, trouble = self.options, Throughput(), Trouble()
        self.shares.begin(self.stream, self.standing.shares)
        passes = self.engine.passes
        if self.shares.measured:
            between = self.engine.groups.layout.shards > 1
            passes.stopwatch = Stopwatch(passes.runtime, self.engine.device, between=between)
        if self.engine.step == 0:
            self.evaluate()
        with self.stop.listening():
            while self.engine.step < self.total:
                update = self._step(pace)
                self.checkpoints.poll()
                trouble = self._mend(update, trouble)
                if trouble.went_back:
                    continue
                step, began = self.engine.step, monotonic()
                last = step == self.total
                if last or _due(step, options.evaluate_every):
                    self.evaluate()
                stopped = self.stop.agreed() and not last
                if last or stopped or _due(step, options.checkpoint_every):
                    self.checkpoints.save()
                    trouble = evolve(trouble, roll_backs=0)
                if stopped or last:
                    self.checkpoints.finish()
                if stopped:
                    self.stop.wait_for_launcher()
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
        standing = self.standing
        standing.loss = update.loss
        standing.tokens += update.tokens
        standing.seconds += monotonic() - began
        self.telling.step(self.engine.step, update, pace)
        watch = self.engine.passes.stopwatch
        if watch and self.shares.settle(self.engine.step, watch.seconds, self.stream):
            standing.shares = list(self.shares.rows)
            self.show.note(f"step {self.engine.step}: {self.shares.changed()}")
        return update

    def _update(self, batch: Mapping[str, Any]) -> Update:
        """One update, recorded if it is due."""
        loss = NextTokenLoss(self.options.mtp_weight, self.options.z_coefficient)

        def refuse(value: float, norm: float) -> bool:
            return self.policy.refuses(value, norm, self.standing.recent)

        if not _due(self.engine.step + 1, self.options.record_every):
            return self.engine.update(batch, loss, refuse=refuse)
        step = self.engine.step
        update, recorder = self.engine.recorded_update(batch, loss, refuse=refuse)
        recorded = recorded_step(recorder, self.engine.groups, step)
        if recorded is not None:
            name = f"step-{self.engine.step:08}.json"
            path = self.options.output_dir / "timelines" / name
            first_does(lambda: write_step(path, recorded))
        return update

    def _mend(self, update: Update, trouble: "Trouble") -> "Trouble":
        """Do about an update what the policy says; the same on every process.

        Raises:
            DivergenceError: it says to stop, or the run is lost.
        """
        standing, step = self.standing, self.engine.step
        if update.skipped is None:
            standing.recent.append((update.loss, update.grad_norm))
            del standing.recent[: -self.options.spike_window]
            return evolve(trouble, in_a_row=0, went_back=False)
        remedy = self.policy.remedy(update)
        counts = standing.skipped
        counts[update.skipped] = counts.get(update.skipped, 0) + 1
        if remedy == "stop":
            self._log_skipped(step, update, "stop")
            self.checkpoints.finish()
            raise DivergenceError(
                f"step {step}: {reason(update)}; the run was to stop at this, its last checkpoint"
                " is whole; lower learning_rate, or let such steps be skipped"
            )
        if remedy == "roll_back" and self.checkpoints.go_back():
            self._log_skipped(step, update, "roll_back")
            standing.rolled_back += 1
            found = Trouble(roll_backs=trouble.roll_backs + 1, went_back=True)
        else:
            self._log_skipped(step, update, "skip")
            found = evolve(trouble, in_a_row=trouble.in_a_row + bool(remedy), went_back=False)
        check_lost(found.in_a_row, found.roll_backs, update)
        return found

    def _log_skipped(self, step: int, update: Update, remedy: str) -> None:
        back = self.engine.step if remedy == "roll_back" else step
        done = f"went back to step {back}" if back < step else "step skipped"
        self.show.note(f"step {step}: {reason(update)}; {'stopped' if remedy == 'stop' else done}")
        scale = self.engine.scaler
        self.emit(
            "skipped",
            {
                "step": step,
                "reason": str(update.skipped),
                "remedy": remedy,
                "loss": update.loss,
                "grad_norm": update.grad_norm,
                "skipped": self.standing.skipped[str(update.skipped)],
                "step_after": back,
                **({"loss_scale": scale.factor} if scale.settings else {}),
            },
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


@frozen(kw_only=True)
class Trouble:
    """What has gone wrong of late."""

    in_a_row: int = 0
    """Steps skipped one after the other by the policy."""
    roll_backs: int = 0
    """Since the last checkpoint was written."""
    went_back: bool = False
    """Whether the last step ended at a checkpoint."""


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

"""A run from its last checkpoint to its result: steps, evaluations, the trained model."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from attrs import evolve, field, frozen

from ms_parallel.cluster.agreement import StopRequest, first_does
from ms_parallel.cluster.process import is_first
from ms_parallel.cluster.watch import position
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.report import StepReport
from ms_parallel.engine.updates.stopwatch import Stopwatch
from ms_parallel.errors import DivergenceError
from ms_parallel.events import OnEvent
from ms_parallel.pipeline.gathering import recorded_step
from ms_parallel.pipeline.step_file import write_step
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.progress import RunDisplay, Throughput, duration
from ms_parallel.training.course.checkpoints import RunCheckpoints, Standing, Stream
from ms_parallel.training.course.policy import Policy, check_lost, check_outcome, reason
from ms_parallel.training.course.step_log import StepLog
from ms_parallel.training.dataset import SHARDS
from ms_parallel.training.held_out import HeldOut
from ms_parallel.training.optional import data_package
from ms_parallel.training.options import Options
from ms_parallel.training.result import Result, printable, write_model
from ms_parallel.training.shares.row_shares import RowShares
from ms_parallel.training.tokenizer import run_tokenizer

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class Run:
    """What `train` has put together, and the loop over it."""

    engine: Engine
    stream: Stream
    shards: Path
    """The folder that the stream reads, with the run's tokenizer."""
    held_out: HeldOut | None
    total: int
    """Steps of the whole run."""
    options: Options
    show: RunDisplay
    emit: OnEvent
    step_log: StepLog
    checkpoints: RunCheckpoints
    standing: Standing
    shares: RowShares
    found: FoundSchedule | None = None
    """The schedule that was searched for this run."""
    stop: StopRequest = field(factory=StopRequest)

    @property
    def _built_here(self) -> bool:
        """Whether the run's own settings say what is held out."""
        return self.shards == self.options.output_dir / SHARDS

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

    def begin(self) -> None:
        """Log what the run is, and take over its last checkpoint."""
        count = sum(parameter.numel() for parameter in self.engine.parameters.values())
        layout = str(self.engine.groups.layout)
        self.emit("begin", {"steps": self.total, "layout": layout, "local_parameters": count})
        if self.found is not None:
            self._note_schedule(self.found)
        if self.held_out is None and self.options.hold_out and self._built_here:
            self._warn(
                f"hold_out = {self.options.hold_out:g} leaves too little text for a held-out loss,"
                " so none is measured; raise it, or give more documents"
            )
        self.checkpoints.resume()

    def _warn(self, text: str) -> None:
        """Log a warning once for all processes, whether or not progress is shown."""
        if is_first():
            logger.warning(text)

    def complete(self) -> Result:
        """Make the steps that are left; at the end, write the model and a sample of its text.

        Raises:
            DivergenceError: the run reached its last step without a usable model.
        """
        options, resumed = self.options, self.engine.step_count
        try:
            finished = self.go()
        finally:
            if self.step_log.audits is not None:
                self.step_log.audits.draw()
        if finished:
            try:
                check_outcome(self.standing, self.engine.step_count, self.engine.optimizer.taken)
            except DivergenceError:
                self.emit("end", {"step": self.engine.step_count, "finished": 0})
                raise
        folder = self._write_model() if finished else None
        sample, prompt = None, options.sample_prompt
        if finished and prompt is not None:
            sample = self.generate(prompt, max_new_tokens=options.sample_tokens)
            self.show.note(f"sample:\n{printable(prompt + sample)}")
        self._note_end(folder, resumed)
        self.emit("end", {"step": self.engine.step_count, "finished": int(finished)})
        standing = self.standing
        return Result(
            step=self.engine.step_count,
            finished=finished,
            stopped_by=None if finished else self.stop.signal_name,
            loss=nan if standing.loss is None else standing.loss,
            held_out_loss=standing.held_out_loss,
            first_held_out_loss=standing.first_held_out_loss,
            tokens=standing.tokens,
            seconds=standing.seconds,
            model_folder=folder,
            sample=sample,
            shares=self.shares.rows,
            slow_ranks=self.shares.slow_ranks,
        )

    def _write_model(self) -> Path:
        """Write the trained model as a Hugging Face folder with its tokenizer."""
        tokenizer = run_tokenizer(self.shards, self.options.model_folder)
        save = partial(self.engine.save, tokenizer=tokenizer)
        return write_model(self.options.output_dir / "model", self.checkpoints.mark, save)

    def _note_schedule(self, found: FoundSchedule) -> None:
        self.emit(
            "schedule",
            {
                "makespan_ms": found.makespan_ms,
                "lower_bound_ms": found.lower_bound_ms,
                "one_f_one_b_ms": found.one_f_one_b_ms,
                "placement": str(found.staged.schedule.placement),
                "layers": str(found.layers),
            },
        )
        self.show.note(
            f"schedule found: a step of {found.makespan_ms:.3g} ms by measured costs, 1F1B"
            f" {found.one_f_one_b_ms:.3g} ms; layers of the stages {found.layers}"
        )

    def _note_end(self, folder: Path | None, resumed: int) -> None:
        """Say how the run, which went on at step `resumed`, has ended."""
        step = self.engine.step_count
        if folder is None:
            self.show.note(
                f"stopped by {self.stop.signal_name} at step {step} of {self.total}; a checkpoint"
                " is saved, the same command goes on"
            )
        elif resumed == step:
            self.show.note(f"already trained to step {resumed}; nothing left to do")
        else:
            earlier = f", {resumed} of them before this launch" if resumed else ""
            took = duration(self.standing.seconds)
            self.show.note(f"trained {step} steps in {took}{earlier}: {folder}")
        if slow := self.shares.report():
            self.show.note(slow)

    def go(self) -> bool:
        """Make the steps that are left.

        Returns:
            False if a signal asked to stop before the last; a checkpoint of that step is written.
        """
        options, pace, trouble = self.options, Throughput(), Trouble()
        self.shares.begin(self.stream, self.standing.shares)
        runner = self.engine.runner
        if self.shares.measured:
            between = self.engine.groups.layout.shards > 1
            runner.stopwatch = Stopwatch(runner.runtime, self.engine.device, between=between)
        if self.engine.step_count == 0:
            self.evaluate()
        with self.stop.listening():
            while self.engine.step_count < self.total:
                update = self._step(pace)
                self.checkpoints.poll()
                trouble = self._mend(update, trouble)
                if trouble.went_back:
                    continue
                step, began = self.engine.step_count, monotonic()
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

    def _step(self, pace: Throughput) -> StepReport:
        began = monotonic()
        position.step, position.activity = self.engine.step_count + 1, "update"
        # Random numbers follow from seed and step, so that a checkpoint need not hold their state.
        torch.manual_seed((self.options.seed * 1_000_003 + self.engine.step_count) % 2**63)
        update = self._update(next(self.stream))
        pace.count(update.tokens)
        standing = self.standing
        if update.skipped != "no_targets":
            standing.loss = update.loss
        standing.tokens += update.tokens
        standing.seconds += monotonic() - began
        self.step_log.log(self.engine.step_count, update, pace)
        watch = self.engine.runner.stopwatch
        if watch and self.shares.settle(self.engine.step_count, watch.seconds, self.stream):
            standing.shares = list(self.shares.rows)
            self.show.note(f"step {self.engine.step_count}: {self.shares.changed()}")
        return update

    def _update(self, batch: Mapping[str, Any]) -> StepReport:
        """Perform one update, recorded if it is due."""
        loss = NextTokenLoss(self.options.mtp_weight, self.options.z_coefficient)

        def accept(value: float, norm: float) -> bool:
            return not self.policy.refuses(value, norm, self.standing.recent)

        if not _due(self.engine.step_count + 1, self.options.record_every):
            return self.engine.step(batch, loss, accept=accept)
        step = self.engine.step_count
        update, recorder = self.engine.record_step(batch, loss, accept=accept)
        recorded = recorded_step(recorder, self.engine.groups, step)
        if recorded is not None:
            name = f"step-{self.engine.step_count:08}.json"
            path = self.options.output_dir / "timelines" / name
            first_does(lambda: write_step(path, recorded))
        return update

    def _mend(self, update: StepReport, trouble: "Trouble") -> "Trouble":
        """Do about an update what the policy says; the same on every process.

        Raises:
            DivergenceError: it says to stop, or the run is lost.
        """
        standing, step = self.standing, self.engine.step_count
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

    def _log_skipped(self, step: int, update: StepReport, remedy: str) -> None:
        back = self.engine.step_count if remedy == "roll_back" else step
        done = f"went back to step {back}" if back < step else "step skipped"
        self._warn(f"step {step}: {reason(update)}; {'stopped' if remedy == 'stop' else done}")
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
        loss, step = self.held_out.loss(self.engine.evaluate), self.engine.step_count
        self.standing.held_out_loss, self.standing.held_out_step = loss, step
        if step == 0:
            self.standing.first_held_out_loss = loss
        self.show.note(f"held-out loss {loss:.4f} at step {step}")
        self.emit("evaluate", {"step": step, "held_out_loss": loss})
        return loss

    def generate(
        self, prompt: str, *, max_new_tokens: int, temperature: float = 0.8, top_k: int = 50
    ) -> str:
        """Continue a text with the model as it is; every process must call it."""
        tokenizer = data_package().Tokenizer.load(self.shards / "tokenizer.json")
        # A document begins as in training; without such tokens, after the end of the one before.
        begin = list(tokenizer.begin_of_text)
        tokens = [*begin, *tokenizer.encode(prompt)] or [tokenizer.end_of_text]
        (written,) = self.engine.generate(
            [tokens],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=self.options.seed,
            stop_token=tokenizer.end_of_text,
        )
        text: str = tokenizer.decode([t for t in written if t < tokenizer.vocabulary_size])
        return text


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

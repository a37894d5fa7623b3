"""A training run: resume, take steps with evaluations and checkpoints, write the model."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from attrs import field, frozen

from ms_parallel.cluster.agreement import StopRequest, run_on_rank_zero
from ms_parallel.cluster.process import is_first
from ms_parallel.cluster.watch import position
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import Loss, NextTokenLoss
from ms_parallel.engine.report import StepReport
from ms_parallel.errors import DivergenceError
from ms_parallel.events import OnEvent
from ms_parallel.optim.clipping import StepLimits
from ms_parallel.pipeline.recorder import recorded_step
from ms_parallel.pipeline.step_file import write_step
from ms_parallel.planner.searched_schedule import SearchedSchedule
from ms_parallel.progress import RunDisplay, Throughput, duration
from ms_parallel.training.checkpoints import RunCheckpoints, RunProgress
from ms_parallel.training.dataset import SHARDS
from ms_parallel.training.held_out import HeldOut
from ms_parallel.training.optional import data_package
from ms_parallel.training.options import Options
from ms_parallel.training.read_ahead import ReadAhead
from ms_parallel.training.recovery import Recovery, check_outcome
from ms_parallel.training.result import Result, printable, write_model
from ms_parallel.training.rows_per_rank.assignment import RowAssignment
from ms_parallel.training.step_log import StepLog
from ms_parallel.training.tokenizer import run_tokenizer

logger = logging.getLogger(__name__)

TakeStep = Callable[..., StepReport]
"""`Engine.step`, or `StepRecorder.step`."""


@frozen(kw_only=True)
class StepRecorder:
    """Engine steps; every N-th is recorded: when each pipeline rank computed which action."""

    engine: Engine
    every: int
    """Steps between recordings."""
    folder: Path
    """Folder of the files."""

    def step(self, batch: Mapping[str, Any], loss: Loss, *, limits: StepLimits) -> StepReport:
        """Take a step like `Engine.step`, and record it if it is due."""
        engine, steps_before = self.engine, self.engine.step_count
        if (steps_before + 1) % self.every:
            return engine.step(batch, loss, limits=limits)
        report, recorder = engine.record_step(batch, loss, limits=limits)
        recorded = recorded_step(recorder, engine.groups, steps_before)
        if recorded is not None:
            path = self.folder / f"step-{steps_before + 1:08}.json"
            run_on_rank_zero(lambda: write_step(path, recorded))
        return report


@frozen(kw_only=True)
class Run:
    """The parts of a training run, and the loop over its steps."""

    engine: Engine
    take_step: TakeStep
    stream: ReadAhead
    shards: Path
    """Folder that the stream reads; holds the run's tokenizer."""
    held_out: HeldOut | None
    total: int
    """Steps of the whole run."""
    options: Options
    display: RunDisplay
    emit: OnEvent
    step_log: StepLog
    checkpoints: RunCheckpoints
    progress: RunProgress
    recovery: Recovery
    shares: RowAssignment
    schedule: SearchedSchedule | None = None
    """Schedule found by `schedule = "search"`."""
    stop: StopRequest = field(factory=StopRequest)

    def resume(self, changes: Sequence[str]) -> None:
        """Log the run and its changed settings, and load the newest checkpoint."""
        for change in changes:
            self.display.note(f"changed: {change}")
            self.emit("changed_setting", {"setting": change})
        count = sum(parameter.numel() for parameter in self.engine.parameters.values())
        layout = str(self.engine.groups.layout)
        self.emit("begin", {"steps": self.total, "layout": layout, "local_parameters": count})
        if self.schedule is not None:
            self._log_schedule(self.schedule)
        built_here = self.shards == self.options.output_dir / SHARDS
        if self.held_out is None and self.options.eval_every is not None and is_first():
            logger.warning(
                "eval_every=%d measures nothing, as the dataset has too little held-out text;"
                " rebuild it with a larger held_out_fraction, or leave eval_every out",
                self.options.eval_every,
            )
        elif self.held_out is None and self.options.held_out_fraction and built_here and is_first():
            logger.warning(
                "held_out_fraction=%g leaves too little text for a held-out loss, so none is"
                " measured; raise it, or add documents",
                self.options.held_out_fraction,
            )
        self.checkpoints.resume()

    def take_steps(self) -> bool:
        """Take the remaining steps.

        Returns:
            False if a signal stopped the run before its last step; a checkpoint is saved.
        """
        engine, options, progress = self.engine, self.options, self.progress
        loss = NextTokenLoss(options.mtp_weight, options.z_loss_coefficient)
        throughput = Throughput()
        self.shares.begin(self.stream, progress.shares)
        if engine.step_count == 0:
            self.evaluate()
        with closing(self.step_log), self.stop.listening():
            while engine.step_count < self.total:
                started = monotonic()
                # Shared with the hang detector, which reports where each rank is.
                position.step, position.activity = engine.step_count + 1, "update"
                # Random numbers follow from seed and step, so checkpoints need no generator state.
                torch.manual_seed((options.seed * 1_000_003 + engine.step_count) % 2**63)
                report = self.take_step(next(self.stream), loss, limits=self.recovery.limits())
                step = engine.step_count
                # A batch without targets has no loss, so the previous one stays.
                if report.skipped != "no_targets":
                    progress.loss = report.loss
                progress.tokens += report.tokens
                progress.samples = (progress.samples or 0) + options.batch_size
                progress.seconds += monotonic() - started
                throughput.count(report.tokens)
                self.step_log.log(step, report, throughput)
                if self.shares.rebalance(step, engine.runner.stopwatch.seconds, self.stream):
                    progress.shares = list(self.shares.rows)
                    self.display.note(f"step {step}: {self.shares.changed()}")
                self.checkpoints.poll()
                # After a roll-back the run is at an earlier step, so nothing below is due.
                if self.recovery.roll_back(report):
                    continue
                paused, last = monotonic(), step == self.total
                # Before the checkpoint, which stores the held-out loss.
                if last or _due(step, options.eval_every):
                    self.evaluate()
                # All ranks must agree to stop, since saving a checkpoint is collective.
                stopped = self.stop.agreed() and not last
                if last or stopped or _due(step, options.checkpoint_every):
                    self.checkpoints.save()
                    # A new checkpoint is progress, so roll-backs are counted from 0 again.
                    self.recovery.roll_backs = 0
                # The process may exit after this, so the checkpoint must be durable first.
                if last or stopped:
                    self.checkpoints.finish()
                if stopped:
                    self.stop.wait_for_launcher()
                    return False
                # Throughput counts training only, without evaluation and checkpoints.
                throughput.pause(monotonic() - paused)
        return True

    def finish(self, finished: bool, resumed: int) -> Result:
        """If all steps are done, write the model and a sample of its text; return the result.

        Args:
            finished: whether all steps were taken.
            resumed: step from which this launch resumed.

        Raises:
            DivergenceError: the run reached its last step without a usable model.
        """
        engine, options, progress = self.engine, self.options, self.progress
        folder: Path | None = None
        sample: str | None = None
        if finished:
            try:
                check_outcome(progress, engine.step_count, engine.optimizer.update_count)
            except DivergenceError:
                self._emit_end(finished=False)
                raise
            tokenizer = run_tokenizer(self.shards, options.model_folder)
            save = partial(engine.save, tokenizer=tokenizer)
            folder = write_model(options.output_dir / "model", self.checkpoints.mark, save)
        if finished and options.sample_prompt is not None:
            sample = self.generate(options.sample_prompt, max_new_tokens=options.sample_tokens)
            self.display.note(f"sample:\n{printable(options.sample_prompt + sample)}")
        self._show_end(folder, resumed)
        # Last, so that the model is saved even if the store fails.
        try:
            self.checkpoints.finish_uploads()
        finally:
            self._emit_end(finished=finished)
        return Result(
            step=engine.step_count,
            finished=finished,
            stopped_by=None if finished else self.stop.signal_name,
            loss=nan if progress.loss is None else progress.loss,
            held_out_loss=progress.held_out_loss,
            first_held_out_loss=progress.first_held_out_loss,
            tokens=progress.tokens,
            seconds=progress.seconds,
            model_folder=folder,
            sample=sample,
            shares=self.shares.rows,
            slow_ranks=self.shares.slow_ranks,
        )

    def evaluate(self) -> float | None:
        """Measure, log and store the held-out loss; None without held-out text."""
        if self.held_out is None:
            return None
        position.activity = "held-out evaluation"
        loss, step = self.held_out.loss(self.engine.evaluate), self.engine.step_count
        self.progress.held_out_loss, self.progress.held_out_step = loss, step
        if step == 0:
            self.progress.first_held_out_loss = loss
        self.display.note(f"held-out loss {loss:.4f} at step {step}")
        rows = self.held_out.rows
        used = {"rows": rows, "rows_left_out": self.held_out.samples - rows}
        self.emit("evaluate", {"step": step, "held_out_loss": loss, **used})
        return loss

    def generate(
        self, prompt: str, *, max_new_tokens: int, temperature: float = 0.8, top_k: int = 50
    ) -> str:
        """Continue a text with the current weights. Collective: every process must call it."""
        tokenizer = data_package().Tokenizer.load(self.shards / "tokenizer.json")
        # Start a document as in training: with its first tokens, or after an end-of-text token.
        prefix = list(tokenizer.begin_of_text)
        tokens = [*prefix, *tokenizer.encode(prompt)] or [tokenizer.end_of_text]
        (generated,) = self.engine.generate(
            [tokens],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=self.options.seed,
            stop_token=tokenizer.end_of_text,
        )
        # Model vocabularies are padded; ids of the padding have no text.
        text: str = tokenizer.decode([t for t in generated if t < tokenizer.vocabulary_size])
        return text

    def _log_schedule(self, result: SearchedSchedule) -> None:
        self.emit(
            "schedule",
            {
                "makespan_ms": result.makespan_ms,
                "lower_bound_ms": result.lower_bound_ms,
                "one_f_one_b_ms": result.one_f_one_b_ms,
                "placement": str(result.staged.schedule.placement),
                "layers": str(result.layers),
            },
        )
        self.display.note(
            f"schedule search: predicted step {result.makespan_ms:.3g} ms from measured costs, 1F1B"
            f" {result.one_f_one_b_ms:.3g} ms; layers per stage {result.layers}"
        )

    def _emit_end(self, *, finished: bool) -> None:
        """Emit the `end` event with totals over all launches."""
        progress = self.progress
        counts = {
            "step": self.engine.step_count,
            "finished": int(finished),
            "tokens": progress.tokens,
            "skipped": sum(progress.skipped.values()),
            "rolled_back": progress.rolled_back,
        }
        self.emit("end", counts)

    def _show_end(self, folder: Path | None, resumed: int) -> None:
        """Print how the run ended; this launch resumed at step `resumed`."""
        step = self.engine.step_count
        if folder is None:
            self.display.note(
                f"stopped by {self.stop.signal_name} at step {step} of {self.total}; a checkpoint"
                " is saved, the same command resumes"
            )
        elif resumed == step:
            self.display.note(f"already trained to step {resumed}; nothing left to do")
        else:
            earlier = f", {resumed} before this launch" if resumed else ""
            took = duration(self.progress.seconds)
            self.display.note(f"trained {step} steps in {took}{earlier}: {folder}")
        if self.progress.skipped:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.progress.skipped.items())
            self.display.note(f"skipped steps: {reasons}")
        if self.progress.rolled_back:
            self.display.note(f"roll-backs to a checkpoint: {self.progress.rolled_back}")
        if slow := self.shares.report():
            self.display.note(slow)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0

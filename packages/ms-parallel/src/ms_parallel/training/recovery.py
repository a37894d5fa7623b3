"""Response to bad steps: skip them, roll back to a checkpoint, or stop the run.

Losses and gradient norms are reduced over all processes, so every process decides the same. A spike
is far above the median of the previous steps, in units of their median absolute deviation.
"""

import logging
from collections.abc import Sequence
from math import inf, isfinite
from statistics import median
from typing import Literal

from attrs import define, frozen

from ms_parallel.cluster.process import is_first
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.report import StepReport
from ms_parallel.errors import DivergenceError
from ms_parallel.events import OnEvent
from ms_parallel.optim.clipping import StepLimits
from ms_parallel.training.checkpoints import RunCheckpoints, RunProgress

logger = logging.getLogger(__name__)

Remedy = Literal["skip", "roll_back", "stop"]
REMEDIES = ("skip", "roll_back", "stop")
MAX_FAILURES_IN_A_ROW = 20
"""Consecutive skipped steps after which a run is ended."""
ROLL_BACKS = 10
"""Roll-backs to one checkpoint after which a run is ended."""
STD_PER_MAD, MIN_MAD_SHARE = 1.4826, 0.01
"""Standard deviation of normal numbers over their median absolute deviation (MAD); smallest MAD
used, as a fraction of the median."""


@frozen(kw_only=True)
class RecoveryPolicy:
    """Settings of a run for bad steps."""

    on_nonfinite: Remedy
    on_spike: Remedy | Literal["ignore"]
    factor: float
    """Standard deviations above the median from which a number is a spike."""
    window: int
    """Steps in the median; nothing is a spike before there are this many."""

    def is_spike(self, value: float, previous: Sequence[float]) -> bool:
        """Return whether a number is far above the previous ones.

        >>> usual = [2.0, 2.1, 1.9, 2.0]
        >>> policy = RecoveryPolicy(
        ...     on_nonfinite="skip", on_spike="skip", factor=10.0, window=4
        ... )
        >>> policy.is_spike(2.4, usual), policy.is_spike(3.0, usual)
        (False, True)
        """
        return value > self.limit(previous)

    def limit(self, previous: Sequence[float]) -> float:
        """Return the largest number that is not a spike; infinite without enough numbers."""
        if len(previous) < self.window:
            return inf
        # Median and median deviation, as a mean would follow earlier spikes.
        center = median(previous)
        # If all numbers are equal the deviation is 0, hence the minimum.
        deviation = STD_PER_MAD * median(abs(number - center) for number in previous)
        return center + self.factor * max(deviation, MIN_MAD_SHARE * abs(center))

    def limits(self, recent: Sequence[Sequence[float]]) -> StepLimits:
        """Return the limits of the next step, given the (loss, gradient norm) of recent steps."""
        if self.on_spike == "ignore":
            return StepLimits()
        losses, norms = [step[0] for step in recent], [step[1] for step in recent]
        return StepLimits(loss=self.limit(losses), grad_norm=self.limit(norms))

    def remedy(self, report: StepReport) -> Remedy | None:
        """Remedy for a step; None if it was taken, or skipped for an overflow in float16."""
        if report.skipped == "nonfinite":
            return self.on_nonfinite
        if report.skipped == "refused":
            return "skip" if self.on_spike == "ignore" else self.on_spike
        return None


@define(kw_only=True)
class Recovery:
    """Applies the policy of a run to its steps; the same on every process."""

    policy: RecoveryPolicy
    engine: Engine
    checkpoints: RunCheckpoints
    progress: RunProgress
    emit: OnEvent
    skipped_in_a_row: int = 0
    """Consecutive steps that the policy skipped."""
    roll_backs: int = 0
    """Roll-backs since the last checkpoint was saved."""

    def limits(self) -> StepLimits:
        """Return the limits of the next step, above which it is a spike."""
        return self.policy.limits(self.progress.recent)

    def roll_back(self, report: StepReport) -> bool:
        """Apply the policy to a step; return whether the run is back at a checkpoint.

        Raises:
            DivergenceError: the policy is to stop, or too many steps were skipped or rolled back.
        """
        progress, step = self.progress, self.engine.step_count
        if report.skipped is None:  # only performed steps enter the window of the spike test
            progress.recent.append((report.loss, report.grad_norm))
            del progress.recent[: -self.policy.window]
            self.skipped_in_a_row = 0
            return False
        remedy = self.policy.remedy(report)
        progress.skipped[report.skipped] = progress.skipped.get(report.skipped, 0) + 1
        if remedy == "stop":
            self._log(step, report, "stop")
            # The message below promises a complete checkpoint.
            self.checkpoints.finish()
            raise DivergenceError(
                f"step {step}: {reason(report)}; stopped as configured, the last checkpoint is"
                " complete; lower learning_rate, or set on_nonfinite or on_spike to 'skip'"
            )
        # Without a checkpoint to return to, the step is only skipped.
        rolled_back = remedy == "roll_back" and self.checkpoints.roll_back()
        self._log(step, report, "roll_back" if rolled_back else "skip")
        if rolled_back:
            progress.rolled_back += 1
            self.roll_backs += 1
            self.skipped_in_a_row = 0
        else:
            # An overflow has no remedy and does not count.
            self.skipped_in_a_row += bool(remedy)
        check_stuck(self.skipped_in_a_row, self.roll_backs, report)
        return rolled_back

    def _log(self, step: int, report: StepReport, remedy: Remedy) -> None:
        step_after = self.engine.step_count if remedy == "roll_back" else step
        done = f"rolled back to step {step_after}" if step_after < step else "step skipped"
        if is_first():
            done = "stopped" if remedy == "stop" else done
            logger.warning("step %d: %s; %s", step, reason(report), done)
        scale = self.engine.scaler
        self.emit(
            "skipped",
            {
                "step": step,
                "reason": str(report.skipped),
                "remedy": remedy,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "skipped": self.progress.skipped[str(report.skipped)],
                "step_after": step_after,
                **({"loss_scale": scale.factor} if scale.settings else {}),
            },
        )


def reason(report: StepReport) -> str:
    """Describe why a step was skipped."""
    loss, norm = f"loss {report.loss:.4g}", f"gradient norm {report.grad_norm:.4g}"
    return {
        "no_targets": "no token had a target",
        "nonfinite": f"gradient is not finite ({loss}, {norm})",
        "overflow": f"gradient overflowed at a loss scale of {report.loss_scale:g}"
        if report.loss_scale
        else "",
        "refused": f"{loss} and {norm} are a spike",
    }[report.skipped or "no_targets"]


def check_stuck(in_a_row: int, roll_backs: int, last: StepReport) -> None:
    """End a run that only skips steps or only rolls back.

    Raises:
        DivergenceError: too many skipped steps in a row, or roll-backs to one checkpoint.
    """
    if in_a_row >= MAX_FAILURES_IN_A_ROW:
        raise DivergenceError(
            f"{in_a_row} steps in a row were skipped: {reason(last)}; lower learning_rate and start"
            " from an earlier checkpoint"
        )
    if roll_backs > ROLL_BACKS:
        raise DivergenceError(
            f"rolled back {ROLL_BACKS} times to one checkpoint: {reason(last)}; lower"
            " learning_rate and start from an earlier checkpoint"
        )


def check_outcome(progress: RunProgress, steps: int, performed: int) -> None:
    """Fail a run that reached its last step without a usable model.

    Args:
        progress: losses and skipped steps of the whole run.
        steps: steps of the whole run, including skipped ones.
        performed: steps that changed the weights.

    Raises:
        DivergenceError: the last loss or the held-out loss is not finite, or most steps were
            skipped.
    """
    if not steps:
        return
    # Overflows in float16 only lower the loss scale; a run often starts with a dozen.
    skipped = sum(count for why, count in progress.skipped.items() if why != "overflow")
    problem = ""
    if not performed or 2 * skipped > steps:
        problem = f"{steps - performed} of {steps} steps were skipped"
    elif progress.held_out_loss is not None and not isfinite(progress.held_out_loss):
        problem = f"the held-out loss is {progress.held_out_loss}"
    elif progress.loss is None or not isfinite(progress.loss):
        problem = "the loss of the last step is not finite"
    if problem:
        raise DivergenceError(
            f"step {steps}: {problem}, so no model is written; lower learning_rate and restart in"
            " another output_dir, or raise steps if only the last batches are bad"
        )

"""What is done about an update that is not as it should be: skip it, roll back, or stop.

Losses and gradient norms are sums over all processes, the same on each, and so is what is decided
by them. A spike lies further above the median of the updates before it than these mostly lie apart.
"""

from collections.abc import Sequence
from math import isfinite
from statistics import median
from typing import Literal, Protocol

from attrs import frozen

from ms_parallel.engine.report import StepReport
from ms_parallel.errors import DivergenceError

Remedy = Literal["skip", "roll_back", "stop"]
REMEDIES = ("skip", "roll_back", "stop")
IN_A_ROW = 20
"""Updates skipped one after the other after which a run is lost."""
ROLL_BACKS = 10
"""To one checkpoint, after which a run is lost."""
NORMAL, LEAST = 1.4826, 0.01
"""The standard deviation in times of the median distance, for normal numbers; and the least
distance that counts, as a share of the median."""


class RunProgress(Protocol):
    """What `check_outcome` reads of a run's progress."""

    loss: float | None
    held_out_loss: float | None
    skipped: dict[str, int]


@frozen(kw_only=True)
class Policy:
    """The rules of a run."""

    on_nonfinite: Remedy
    on_spike: Remedy | Literal["ignore"]
    factor: float
    """Times of the usual distance from the median beyond which a number is a spike."""
    window: int
    """Updates that the median is of; before there are so many nothing is a spike."""

    def is_spike(self, value: float, before: Sequence[float]) -> bool:
        """Return whether a number is far above those before it.

        >>> usual = [2.0, 2.1, 1.9, 2.0]
        >>> policy = Policy(on_nonfinite="skip", on_spike="skip", factor=10.0, window=4)
        >>> policy.is_spike(2.4, usual), policy.is_spike(3.0, usual)
        (False, True)
        """
        if len(before) < self.window:
            return False
        middle = median(before)
        apart = NORMAL * median(abs(each - middle) for each in before)
        return value > middle + self.factor * max(apart, LEAST * abs(middle))

    def refuses(self, loss: float, norm: float, recent: Sequence[Sequence[float]]) -> bool:
        """Return whether an update of this loss and norm is a spike after those of `recent`."""
        if self.on_spike == "ignore":
            return False
        losses, norms = [each[0] for each in recent], [each[1] for each in recent]
        return self.is_spike(loss, losses) or self.is_spike(norm, norms)

    def remedy(self, update: StepReport) -> Remedy | None:
        """Choose the remedy for an update; None if it was performed, or an overflow is mended."""
        if update.skipped == "nonfinite":
            return self.on_nonfinite
        if update.skipped == "refused":
            return "skip" if self.on_spike == "ignore" else self.on_spike
        return None


def reason(update: StepReport) -> str:
    """Say in words what was wrong with an update."""
    loss, norm = f"loss {update.loss:.4g}", f"gradient norm {update.grad_norm:.4g}"
    return {
        "no_targets": "nothing had a loss",
        "nonfinite": f"gradient is not finite ({loss}, {norm})",
        "overflow": f"gradient overflowed at a loss scale of {update.loss_scale:g}"
        if update.loss_scale
        else "",
        "refused": f"{loss} and {norm} are a spike",
    }[update.skipped or "no_targets"]


def check_lost(in_a_row: int, roll_backs: int, last: StepReport) -> None:
    """End a run that only ever skips, or rolls back.

    Raises:
        DivergenceError: it does.
    """
    if in_a_row >= IN_A_ROW:
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
    """Refuse to call a run that reached its last step a success if it has no usable model.

    Args:
        progress: losses and skipped updates of the whole run.
        steps: updates of the whole run, skipped ones included.
        performed: updates that changed the weights.

    Raises:
        DivergenceError: the last loss or the held-out loss is not finite, or most updates were
            skipped.
    """
    if not steps:
        return
    # Overflows in float16 only lower the loss scale; a run may begin with a dozen.
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

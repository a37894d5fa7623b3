"""What an audit found: the gradients of one update beside those of the same batch in float32."""

from collections.abc import Mapping
from math import isfinite

from attrs import frozen

SMALL = 1e-3
"""A group whose gradient is a smaller share of the whole is reported, but raises no alarm: what is
zero but for rounding, such as that of a bias that softmax takes out, differs from itself."""


@frozen(kw_only=True)
class Levels:
    """Differences above which an audit raises its alarm."""

    loss: float
    """Relative difference of the loss."""
    error: float
    """Relative error of a group's gradient."""
    gain: float
    """Relative difference of a group's gradient along float32's."""


LEVELS = {
    "float16": Levels(loss=1e-3, error=0.02, gain=0.003),
    "bfloat16": Levels(loss=5e-3, error=0.1, gain=0.005),
    "float32": Levels(loss=1e-6, error=1e-5, gain=1e-6),
}
"""By the precision that is audited. Rounding is as often up as down, so that it moves a gradient
across float32's far more than along it: a wrong factor shows in the gain alone."""


@frozen(kw_only=True)
class Compared:
    """The gradient of a group of parameters beside float32's."""

    error: float
    """Norm of the difference, over that of float32's."""
    gain: float
    """How much longer it is along float32's direction, relative."""
    share: float
    """Norm of float32's, over that of the whole gradient."""


@frozen(kw_only=True)
class Audit:
    """One update in its own precision and in float32; the same on every process."""

    loss: float
    loss_float32: float
    groups: Mapping[str, Compared]
    """By the name of a part of the model, such as `model.layers.0.mlp`."""
    levels: Levels

    @property
    def loss_difference(self) -> float:
        """Difference of the two losses, relative to float32's."""
        return abs(self.loss - self.loss_float32) / max(abs(self.loss_float32), 1e-30)

    @property
    def worst(self) -> str:
        """The group whose gradient is furthest from float32's, in times of its levels."""
        return max(self.groups, key=lambda name: self.excess(self.groups[name]), default="")

    def excess(self, group: Compared) -> float:
        """Return the larger of error and gain in times of its level; above 1 is an alarm."""
        if group.share < SMALL:
            return 0.0
        found = [group.error / self.levels.error, abs(group.gain) / self.levels.gain]
        return max(found) if all(map(isfinite, found)) else float("inf")

    @property
    def alarms(self) -> tuple[str, ...]:
        """The groups above their level, and `loss` if the losses are too far apart."""
        wrong = [name for name, group in self.groups.items() if self.excess(group) > 1.0]
        return (*(["loss"] if not self.loss_difference <= self.levels.loss else []), *wrong)

"""Result of an audit: the gradients of one update compared with float32 on the same batch."""

from collections.abc import Mapping
from math import isfinite

from attrs import frozen

MIN_GRADIENT_SHARE = 1e-3
"""Groups with a smaller share of the gradient norm are reported but raise no alarm: a gradient that
is zero up to rounding, such as a key bias that softmax cancels, has no meaningful error."""


@frozen(kw_only=True)
class AlarmLevels:
    """Alarm thresholds of an audit."""

    loss: float
    """Relative difference of the loss."""
    error: float
    """Relative error of a group's gradient."""
    gain: float
    """Relative difference of a group's gradient along the float32 direction."""


LEVELS = {
    "float8": AlarmLevels(loss=0.02, error=0.5, gain=0.1),
    "float16": AlarmLevels(loss=1e-3, error=0.02, gain=0.003),
    "bfloat16": AlarmLevels(loss=5e-3, error=0.1, gain=0.005),
    "float32": AlarmLevels(loss=1e-6, error=1e-5, gain=1e-6),
}
"""Thresholds by audited precision. Rounding errors have random signs, so they move a gradient far
more across the float32 direction than along it; a wrong factor shows only in the gain."""


@frozen(kw_only=True)
class GroupComparison:
    """Gradient of a parameter group compared with float32."""

    error: float
    """Norm of the difference, relative to the float32 norm."""
    gain: float
    """Relative excess length along the float32 direction."""
    share: float
    """float32 norm, relative to the global gradient norm."""


@frozen(kw_only=True)
class AuditResult:
    """One update in the engine's precision and in float32; the same on every process."""

    loss: float
    loss_float32: float
    groups: Mapping[str, GroupComparison]
    """Comparison by model part, such as `model.layers.0.mlp`."""
    levels: AlarmLevels

    @property
    def loss_difference(self) -> float:
        """Difference of the two losses, relative to float32's."""
        return abs(self.loss - self.loss_float32) / max(abs(self.loss_float32), 1e-30)

    @property
    def worst(self) -> str:
        """Group whose gradient difference is largest relative to its levels."""
        return max(self.groups, key=lambda name: self.excess(self.groups[name]), default="")

    def excess(self, group: GroupComparison) -> float:
        """Return the larger of error and gain relative to their levels; above 1 is an alarm."""
        if group.share < MIN_GRADIENT_SHARE:
            return 0.0
        ratios = [group.error / self.levels.error, abs(group.gain) / self.levels.gain]
        return max(ratios) if all(map(isfinite, ratios)) else float("inf")

    @property
    def alarms(self) -> tuple[str, ...]:
        """Groups above their levels, and `loss` if the losses differ too much."""
        exceeded = [name for name, group in self.groups.items() if self.excess(group) > 1.0]
        return (*(["loss"] if not self.loss_difference <= self.levels.loss else []), *exceeded)

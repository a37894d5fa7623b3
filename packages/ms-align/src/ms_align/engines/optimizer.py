"""Optimizer settings of all engines."""

from typing import Any

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import integer, number, short_repr


def _betas(value: Any) -> tuple[float, float]:
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in pair):
        raise ConfigError(
            "betas must be two numbers from 0 to below 1, got "
            f"{short_repr(list(pair) or value)}; change them"
        )
    return pair


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class OptimizerOptions:
    """AdamW with linear warmup and optional linear decay."""

    learning_rate: float = field(default=3e-6, validator=number())
    """Peak learning rate."""
    warmup_steps: int = field(default=0, validator=integer(minimum=0))
    """Updates of linear warmup."""
    decay_steps: int | None = field(default=None, validator=integer(optional=True))
    """Updates of linear decay after warmup, to `final_learning_rate_ratio`. None: no decay."""
    final_learning_rate_ratio: float = field(default=0.0, validator=number(maximum=1.0))
    """Final learning rate as a fraction of the peak."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), converter=_betas)
    """Decay rates of the first and second moments."""
    eps: float = field(default=1e-8, validator=number(minimum=1e-20))
    """Added to the denominator for numerical stability."""
    weight_decay: float = field(default=0.0, validator=number())
    """Decoupled weight decay; not applied to one-dimensional weights (norms, biases)."""
    max_grad_norm: float | None = field(default=1.0, validator=number(minimum=1e-12, optional=True))
    """Maximum global gradient norm. None: no clipping."""

    def rate(self, step: int) -> float:
        """Return the learning rate of update `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        progress = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return self.learning_rate * (1 - progress * (1 - self.final_learning_rate_ratio))

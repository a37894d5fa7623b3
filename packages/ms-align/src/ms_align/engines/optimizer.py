"""Settings of the optimizer that every engine takes."""

from typing import Any

from attrs import field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import number, whole


def _betas(value: Any) -> tuple[float, float]:
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in pair):
        shown = list(pair) or value
        raise ConfigError(f"betas is {shown!r}; give two numbers of at least 0, below 1")
    return pair


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class OptimizerOptions:
    """AdamW with linear warm-up and a linear or no decay."""

    learning_rate: float = field(default=3e-6, validator=number())
    """The highest rate."""
    warmup_steps: int = field(default=0, validator=whole(least=0))
    """Updates over which the rate rises in a straight line."""
    decay_steps: int | None = field(default=None, validator=whole(optional=True))
    """Updates over which it then falls in a straight line to `final_learning_rate_ratio`."""
    final_learning_rate_ratio: float = field(default=0.0, validator=number(most=1.0))
    """Share of the highest rate that the decay ends at."""
    betas: tuple[float, float] = field(default=(0.9, 0.999), converter=_betas)
    """How much of the old moments an update keeps."""
    epsilon: float = field(default=1e-8, validator=number(least=1e-20))
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.0, validator=number())
    """Decoupled; weights of one dim (norms, biases) are never decayed."""
    max_grad_norm: float | None = field(default=1.0, validator=number(least=1e-12, optional=True))
    """Gradients of a greater global norm are scaled down to it; None never scales."""

    def rate(self, step: int) -> float:
        """Compute the learning rate of update number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return self.learning_rate
        passed = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return self.learning_rate * (1 - passed * (1 - self.final_learning_rate_ratio))

"""The optimizer's settings, and the learning rate as a pure function of them."""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module

from attrs import Attribute, field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest, number, shown, whole

Decay = Callable[[float], float]
"""Maps the share of the updates that have passed to the share of the fall that is left."""
LEAST = 1e-30
"""Smallest divisor that is accepted."""


@cache
def decays() -> Mapping[str, Decay]:
    """The ways in which a learning rate falls, by name: each module of `decays/` is one."""
    room = import_module("ms_parallel.engine.decays")
    names = sorted(module.name for module in pkgutil.iter_modules(room.__path__))
    modules = [import_module(f"{room.__name__}.{name}") for name in names]
    return {module.NAME: module.share_left for module in modules}


def decay(instance: object, attribute: "Attribute[str]", value: object) -> None:
    """Check that a decay of this name exists."""
    if value not in decays():
        raise ConfigError(f"{attribute.name} is {shown(value)}; {nearest(str(value), decays())}")


def betas(value: Sequence[float]) -> tuple[float, float]:
    """Convert a list of two decays of moments to a pair.

    Raises:
        ConfigError: it is not two numbers from 0 up to, not including, 1.
    """
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    fits = [isinstance(b, int | float) and not isinstance(b, bool) and 0 <= b < 1 for b in pair]
    if len(pair) != 2 or not all(fits):
        raise ConfigError(
            f"betas is {shown(value)}; give two numbers from 0 up to, not including, 1"
        )
    return pair


@frozen(kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019) with a linear warm-up and a decay.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    learning_rate: float = field(default=3e-4, validator=number())
    """The highest rate, reached at the end of the warm-up."""
    warmup_steps: int = field(default=0, validator=whole(least=0))
    """Updates over which the rate rises in a straight line."""
    decay: str = field(default="cosine", validator=decay)
    """How the rate then falls: `cosine` or `linear`."""
    decay_steps: int | None = field(default=None, validator=whole(optional=True))
    """Updates, with the warm-up's, after which it has reached its floor; None keeps the highest."""
    final_ratio: float = field(default=0.1, validator=number(most=1.0))
    """The floor, as a share of `learning_rate`."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas)
    """Decay of the first and second moment."""
    epsilon: float = field(default=1e-8, validator=number(least=LEAST))
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.1, validator=number())
    """Decoupled decay of matrices; norms' weights and biases (one dim) are never decayed."""
    max_grad_norm: float | None = field(default=1.0, validator=number(least=LEAST, optional=True))
    """Gradients of a greater global norm are scaled down to it; None never scales."""


def learning_rate(step: int, config: AdamWConfig) -> float:
    """Rate of update number `step`, counted from 0.

    Warm-up: lr·(step+1)/warmup. Then lr·(f + (1-f)·d(t)), with t the share of `decay_steps` after
    the warm-up that has passed, d the decay and f the `final_ratio`.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_steps is None:
        return peak
    span = max(config.decay_steps - config.warmup_steps, 1)
    passed = min((step - config.warmup_steps) / span, 1.0)
    floor = config.final_ratio
    return peak * (floor + (1.0 - floor) * decays()[config.decay](passed))

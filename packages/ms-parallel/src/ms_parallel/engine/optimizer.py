"""AdamW over the shards that this process holds, and the learning rate as a pure function."""

import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import Attribute, field, frozen
from attrs.validators import and_, deep_iterable, max_len, min_len, optional
from torch import Tensor
from torch.optim.adamw import adamw

from ms_parallel.errors import ConfigError

__all__ = ["AdamW", "AdamWConfig", "learning_rate", "optimizer_config"]

FUSED_DEVICES = {"cpu", "cuda"}


Check = Callable[[object, "Attribute[Any]", Any], None]


def _number(fits: Callable[[Any], bool], remedy: str) -> Check:
    """A validator for a finite number that `fits`."""

    def check(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and -sys.float_info.max <= value <= sys.float_info.max and fits(value)):
            raise ConfigError(f"optimizer setting {attribute.name} is {value!r}; give {remedy}")

    return check


_share = _number(lambda value: 0.0 <= value <= 1.0, "a number from 0 to 1")
_not_negative = _number(lambda value: value >= 0, "0 or more")
_positive = _number(lambda value: value > 0, "a number above 0")
_positive_or_none: Check = optional(_positive)
_beta = _number(lambda value: 0.0 <= value < 1.0, "two numbers from 0 up to, not including, 1")


@frozen(kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019) with linear warm-up and cosine decay."""

    learning_rate: float = field(default=3e-4, validator=_not_negative)
    """The highest rate, reached at the end of the warm-up."""
    warmup_steps: int = field(default=0, validator=_not_negative)
    """Updates over which the rate rises in a straight line."""
    decay_steps: int | None = field(default=None, validator=_positive_or_none)
    """Updates after which the cosine has reached its floor; None keeps the highest rate."""
    final_ratio: float = field(default=0.1, validator=_share)
    """Floor of the cosine, as a share of `learning_rate`."""
    betas: tuple[float, float] = field(
        default=(0.9, 0.95),
        converter=tuple,
        validator=deep_iterable(_beta, and_(min_len(2), max_len(2))),
    )
    """Decay of the first and second moment."""
    epsilon: float = field(default=1e-8, validator=_positive)
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.1, validator=_not_negative)
    """Decoupled decay of matrices; norms' weights and biases (one dim) are never decayed."""
    max_grad_norm: float | None = field(default=1.0, validator=_positive_or_none)
    """Gradients of a greater global norm are scaled down to it; None never scales."""


OPTIMIZERS = {"AdamW": AdamWConfig}


def optimizer_config(name: str, **settings: float | int | None) -> AdamWConfig:
    """The configuration of the optimizer called `name`.

    Raises:
        ConfigError: no optimizer of that name; the message gives the nearest.
    """
    if name not in OPTIMIZERS:
        known = {known.lower(): known for known in OPTIMIZERS}
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
        raise ConfigError(f"optimizer {name!r} is not known; the nearest is {known[near[0]]!r}")
    return OPTIMIZERS[name](**settings)  # type: ignore[arg-type]


def learning_rate(step: int, config: AdamWConfig) -> float:
    """Rate of update number `step`, counted from 0.

    Warm-up: lr·(step+1)/warmup. Then lr·(f + (1-f)·(1+cos(π·t))/2), with t the share of
    `decay_steps` after the warm-up that has passed and f the `final_ratio`.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.decay_steps is None:
        return peak
    span = max(config.decay_steps - config.warmup_steps, 1)
    passed = min((step - config.warmup_steps) / span, 1.0)
    floor = config.final_ratio
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * passed)))


class AdamW:
    """AdamW on the local part of each parameter; moments are float32 and lie beside them.

    Working on local tensors costs no DTensor dispatch, and lets parameters that lie on different
    meshes be updated in one fused call.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: AdamWConfig) -> None:
        self.config = config
        self.moments = {
            name: (torch.zeros_like(tensor), torch.zeros_like(tensor))
            for name, tensor in parameters.items()
        }
        self.taken = 0
        """Updates that were performed; a skipped one does not count towards bias correction."""
        self.fused = {tensor.device.type for tensor in parameters.values()} <= FUSED_DEVICES

    @torch.no_grad()
    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rate: float
    ) -> None:
        """Update `parameters` (local tensors, by name) in place from their `gradients`."""
        matrices = [name for name in gradients if _is_decayed(parameters[name])]
        vectors = [name for name in gradients if not _is_decayed(parameters[name])]
        self._step(matrices, parameters, gradients, rate, self.config.weight_decay)
        self._step(vectors, parameters, gradients, rate, 0.0)
        self.taken += 1

    def _step(
        self,
        names: Sequence[str],
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        rate: float,
        weight_decay: float,
    ) -> None:
        held = [name for name in names if parameters[name].numel()]
        if not held:
            return
        device = parameters[held[0]].device if self.fused else "cpu"
        steps = torch.full((len(held),), float(self.taken), device=device).unbind()
        adamw(
            [parameters[name] for name in held],
            [gradients[name] for name in held],
            [self.moments[name][0] for name in held],
            [self.moments[name][1] for name in held],
            [],
            list(steps),
            foreach=False if self.fused else None,
            fused=self.fused,
            amsgrad=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.config.epsilon,
            maximize=False,
        )


def _is_decayed(parameter: Tensor) -> bool:
    return parameter.dim() > 1

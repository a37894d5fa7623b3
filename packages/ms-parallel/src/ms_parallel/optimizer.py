"""AdamW over the shards that this process holds, and the learning rate as a pure function."""

import difflib
import math
from collections.abc import Mapping, Sequence

import torch
from attrs import Attribute, field, frozen
from attrs.validators import and_, ge, gt, le, optional
from torch import Tensor
from torch.optim.adamw import adamw

from ms_parallel.errors import ConfigError

__all__ = ["AdamW", "AdamWConfig", "learning_rate", "optimizer_config"]

FUSED_DEVICES = {"cpu", "cuda"}


def _betas(instance: object, attribute: "Attribute[tuple[float, float]]", value: tuple[float, float]) -> None:
    if len(value) != 2 or not all(0.0 <= beta < 1.0 for beta in value):
        raise ConfigError(f"betas are {value}; give two numbers from 0 up to, not including, 1")


@frozen(kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov and Hutter, 2019) with linear warm-up and cosine decay."""

    learning_rate: float = field(default=3e-4, validator=ge(0.0))
    """The highest rate, reached at the end of the warm-up."""
    warmup_steps: int = field(default=0, validator=ge(0))
    """Updates over which the rate rises in a straight line."""
    decay_steps: int | None = field(default=None, validator=optional(gt(0)))
    """Updates after which the cosine has reached its floor; None keeps the highest rate."""
    final_ratio: float = field(default=0.1, validator=and_(ge(0.0), le(1.0)))
    """Floor of the cosine, as a share of `learning_rate`."""
    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=tuple, validator=_betas)
    """Decay of the first and second moment."""
    epsilon: float = field(default=1e-8, validator=gt(0.0))
    """Added to the root of the second moment."""
    weight_decay: float = field(default=0.1, validator=ge(0.0))
    """Decoupled decay of matrices; norms' weights and biases (one dim) are never decayed."""
    max_grad_norm: float | None = field(default=1.0, validator=optional(gt(0.0)))
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

    Warm-up: lr·(step+1)/warmup. Then lr·(f + (1−f)·(1+cos(π·t))/2), with t the share of
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
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rate: float) -> None:
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

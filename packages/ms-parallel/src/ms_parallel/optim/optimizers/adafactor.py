"""Adafactor (Shazeer and Stern, 2018): second moments factored into row and column means.

Each weight is gathered and updated by one owning process, because means and norms need the full
weight.
"""

from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from ms_parallel.optim.optimizer import MIN_DIVISOR, OptimizerConfig, kind_of
from ms_parallel.optim.rule import LocalParameters, UpdateRule
from ms_parallel.optim.torch_rule import OwnersRule
from ms_parallel.settings import number


@frozen(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor as in `torch.optim.Adafactor`; steps are relative to the RMS of the weights.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    decay_power: float = field(default=0.8, validator=number())
    """Decay of the second moment at step t: 1 - t^-power."""
    least_root: float | None = field(
        default=None, validator=number(minimum=MIN_DIVISOR, optional=True)
    )
    """Lower bound of the root of the second moment; None for float32's machine epsilon."""
    least_scale: float = field(default=1e-3, validator=number())
    """Lower bound of the weight RMS that a step is relative to."""
    clip: float = field(default=1.0, validator=number(minimum=1.0))
    """Clip the RMS of an update to this."""

    def rules(self, params: LocalParameters) -> list[UpdateRule]:
        """Build a rule per parameter group, separately for matrices and vectors."""
        return [
            OwnersRule(params, group, partial(_adafactor, group.config))
            for group in self.parameter_groups(params)
        ]


def _adafactor(config: AdafactorConfig, tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(
        tensors,
        lr=1.0,  # replaced by the scheduled rate before each step
        beta2_decay=-config.decay_power,
        eps=(config.least_root, config.least_scale),
        d=config.clip,
    )


KINDS = {"Adafactor": kind_of(AdafactorConfig)}

"""Adafactor (Shazeer and Stern, 2018): the second moment factored into row and column means.

One owning process gathers and updates each weight, because means and norms span all of it.
"""

from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from ms_parallel.engine.optimizer import LEAST, OptimizerConfig, kind_of
from ms_parallel.engine.rules.rule import Held, Rule
from ms_parallel.engine.rules.torch_rule import OwnersRule
from ms_parallel.settings import number


@frozen(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor as `torch.optim.Adafactor`, whose steps are relative to the size of weights.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    decay_power: float = field(default=0.8, validator=number())
    """The second moment's decay after t updates is 1 - t^-power."""
    least_root: float | None = field(default=None, validator=number(minimum=LEAST, optional=True))
    """Least root of the second moment; None for the smallest step of a float32 at 1."""
    least_scale: float = field(default=1e-3, validator=number())
    """Least size of weights that a step is relative to."""
    clip: float = field(default=1.0, validator=number(minimum=1.0))
    """Updates of a greater root mean square are scaled down to it."""

    def rules(self, held: Held) -> list[Rule]:
        """Build a rule per parameter group, separately for matrices and vectors."""
        return [
            OwnersRule(held, share, partial(_adafactor, share.config))
            for share in self.shares(held)
        ]


def _adafactor(config: AdafactorConfig, tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(
        tensors,
        lr=1.0,
        beta2_decay=-config.decay_power,
        eps=(config.least_root, config.least_scale),
        d=config.clip,
    )


KINDS = {"Adafactor": kind_of(AdafactorConfig)}

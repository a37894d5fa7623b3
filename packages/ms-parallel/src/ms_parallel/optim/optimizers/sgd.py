"""Stochastic gradient descent with momentum (Polyak, 1964; Sutskever et al., 2013)."""

from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.optim.optimizer import OptimizerConfig, kind_of
from ms_parallel.optim.rule import LocalParameters, UpdateRule
from ms_parallel.optim.torch_rule import PartsRule
from ms_parallel.settings import flag, number


@frozen(kw_only=True)
class SGDConfig(OptimizerConfig):
    """SGD as in `torch.optim.SGD`, but with decoupled weight decay.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    momentum: float = field(default=0.9, validator=number(below=1.0))
    """Momentum coefficient; 0 disables momentum."""
    nesterov: bool = field(default=False, validator=flag)
    """Use Nesterov momentum."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=true needs momentum above 0, for example 0.9")

    def rules(self, params: LocalParameters) -> list[UpdateRule]:
        """Build a rule per parameter group, separately for matrices and vectors."""
        return [
            PartsRule(params, group, partial(_sgd, group.config), "SGD")
            for group in self.parameter_groups(params)
        ]


def _sgd(config: SGDConfig, tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0, momentum=config.momentum, nesterov=config.nesterov)


KINDS = {"SGD": kind_of(SGDConfig)}

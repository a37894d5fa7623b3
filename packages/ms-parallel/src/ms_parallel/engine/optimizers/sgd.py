"""Stochastic gradient descent with momentum (Polyak, 1964; Sutskever et al., 2013)."""

from functools import partial
from typing import Any

import torch
from attrs import field, frozen

from ms_parallel.engine.optimizer import OptimizerConfig, kind_of
from ms_parallel.engine.rules.rule import Held, Rule
from ms_parallel.engine.rules.torch_rule import PartsRule
from ms_parallel.errors import ConfigError
from ms_parallel.settings import flag, number


@frozen(kw_only=True)
class SGDConfig(OptimizerConfig):
    """SGD as `torch.optim.SGD`, with decoupled weight decay as in all optimizers here.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    momentum: float = field(default=0.9, validator=number(below=1.0))
    """What is kept of the sum of gradients from one update to the next; 0 keeps no sum."""
    nesterov: bool = field(default=False, validator=flag)
    """Look one step ahead along the momentum."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0; set momentum, such as 0.9")

    def rules(self, held: Held) -> list[Rule]:
        """Build a rule per parameter group, separately for matrices and vectors."""
        return [
            PartsRule(held, share, partial(_sgd, share.config), "SGD")
            for share in self.shares(held)
        ]


def _sgd(config: SGDConfig, tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=1.0, momentum=config.momentum, nesterov=config.nesterov)


KINDS = {"SGD": kind_of(SGDConfig)}

"""AdamW (Loshchilov and Hutter, 2019), fused where torch can."""

from collections.abc import Mapping

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.optim.adamw import adamw

from ms_parallel.engine.optimizer import LEAST, OptimizerConfig, Share, betas, kind_of
from ms_parallel.engine.rules.rule import Held, Moments, Rule
from ms_parallel.settings import number
from ms_parallel.split.part import local_part

FUSED_DEVICES = {"cpu", "cuda"}


@frozen(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, 2019) with a linear warm-up and a decay.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    betas: tuple[float, float] = field(default=(0.9, 0.95), converter=betas)
    """Decay of the first and second moment."""
    epsilon: float = field(default=1e-8, validator=number(least=LEAST))
    """Added to the root of the second moment."""

    def rules(self, held: Held) -> list[Rule]:
        """One for each group, matrices and vectors apart."""
        return adamw_rules(self, held.parameters)


def adamw_rules(
    config: OptimizerConfig, parameters: Mapping[str, Tensor], ratio: float = 1.0
) -> list[Rule]:
    """AdamW's rules of some parameters.

    Args:
        config: settings, whose are betas and epsilon among others.
        parameters: by name.
        ratio: what each group's rate is multiplied by.
    """
    dims = {name: parameter.dim() for name, parameter in parameters.items()}
    shares = (evolve(share, rate=share.rate * ratio) for share in config.shares(dims))
    return [AdamWRule(parameters, share) for share in shares]


class AdamWRule:
    """AdamW on the local part of each parameter; moments are float32 and lie beside them."""

    whole: Moments = {}  # noqa: RUF012 - there are none, and none is added

    def __init__(self, parameters: Mapping[str, Tensor], share: Share) -> None:
        self.share = share
        self.parameters = {name: parameters[name] for name in share.names}
        local = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        self.first = {name: torch.zeros_like(part) for name, part in local.items()}
        self.second = {name: torch.zeros_like(part) for name, part in local.items()}
        self.fused = {part.device.type for part in local.values()} <= FUSED_DEVICES

    @property
    def moments(self) -> Moments:
        """The mean of the gradient, and of its square."""
        return {"exp_avg": self.first, "exp_avg_sq": self.second}

    def step(self, gradients: Mapping[str, Tensor], rate: float, taken: int) -> None:
        """Update the parameters in place."""
        parts = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        held = [name for name, part in parts.items() if part.numel()]
        if not held:
            return
        device = parts[held[0]].device if self.fused else "cpu"
        steps = torch.full((len(held),), float(taken), device=device).unbind()
        adamw(
            [parts[name] for name in held],
            [gradients[name] for name in held],
            [self.first[name] for name in held],
            [self.second[name] for name in held],
            [],
            list(steps),
            foreach=False if self.fused else None,
            fused=self.fused,
            amsgrad=False,
            beta1=self.share.config.betas[0],
            beta2=self.share.config.betas[1],
            lr=rate * self.share.rate,
            weight_decay=self.share.weight_decay,
            eps=self.share.config.epsilon,
            maximize=False,
        )


KINDS = {"AdamW": kind_of(AdamWConfig)}

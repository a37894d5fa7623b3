"""PPO: token-level GAE advantages from a value model, several clipped updates per rollout."""

from typing import Any, ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from ms_align.engines.local import LocalEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.lora.adapters import merged_copy
from ms_align.losses.advantage import gae, whiten
from ms_align.losses.ppo import PPOLoss, ValueLoss
from ms_align.losses.protocol import Loss
from ms_align.rollouts.experience import Experience, token_rewards
from ms_align.settings import flag, integer, number, valid_path
from ms_align.trainers.base.online import OnlineTrainer
from ms_align.used_settings import UsedIf


@frozen(kw_only=True, slots=False)
class PPOTrainer(OnlineTrainer):
    """Optimize a reward with PPO.

    `PPOTrainer(policy_model=policy, reward_model=reward, kl_coeff=0.2).optimize(prompts)`; every
    setting is a keyword argument, and training starts with `optimize`.

    Raises:
        ConfigError: a setting has the wrong type or is out of range.
    """

    algorithm = "ppo"

    value_model: Any = field(default=None, validator=valid_path(optional=True, objects=True))
    """Value model. None: a value head on the policy's hidden states. `"copy"`: a separate copy of
    the initial policy, trained in full even with `lora`. Or a folder; in Python also a module, or
    an Engine with a head `value`."""
    epochs: int = field(default=4, validator=integer())
    """Passes over each rollout."""
    kl_coeff: float = field(default=0.05, validator=number())
    gamma: float = field(default=1.0, validator=number(maximum=1.0))
    """Discount factor per token."""
    lam: float = field(default=0.95, validator=number(maximum=1.0))
    """λ of GAE."""
    value_coeff: float = field(default=0.1, validator=number())
    """Weight of the value loss if the value head shares the policy's model."""
    value_clip: float | None = field(default=0.2, validator=number(optional=True))
    """Clip range of value changes within a rollout. None: no clipping."""
    whiten_advantages: bool = field(default=True, validator=flag)
    """Normalize the advantages of a rollout to mean 0 and standard deviation 1."""
    whiten_rewards: bool = field(default=False, validator=flag)
    """Divide rewards by their standard deviation, keeping the mean."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf("value_coeff", "without value_model", lambda run: run.value_model is None),
    )

    def heads(self) -> dict[str, int]:
        """Return the value head, if it shares the policy's model."""
        return {"value": 1} if self.value_model is None else {}

    def value_engine(self, policy: Engine) -> Engine:
        """Return the policy's engine, or build one for a separate value model."""
        model: Any = self.value_model
        if model is None:
            return policy
        if model == "copy" and self.layout is not None:
            model = self.policy_model  # a sharded model is not copied but loaded a second time
        elif model == "copy":
            if not isinstance(policy, LocalEngine):
                raise ConfigError(
                    "this engine's policy cannot be copied; pass an Engine as value_model"
                )
            model = merged_copy(policy.module)
        return self.start_engine(model, heads={"value": 1})

    def loss(self, kl_coeff: float) -> PPOLoss:
        """Build the clipped policy loss, with the value loss if it shares the policy's model."""
        return PPOLoss(
            **self.surrogate(kl_coeff),
            value_coeff=self.value_coeff if self.value_model is None else 0.0,
            value_clip=self.value_clip,
        )

    def value_loss(self) -> Loss | None:
        """Build the loss of a separate value model."""
        return None if self.value_model is None else ValueLoss(clip=self.value_clip)

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute advantages and returns, (N, S) each."""
        assert experience.values is not None
        mask = experience.mask
        rewards = token_rewards(experience, kl_coeff, self.kl_estimator)  # (N, S)
        if self.whiten_rewards:
            # The mean is kept, as it is part of the objective.
            rewards = whiten(rewards, mask, shift_mean=False)
        advantages = gae(rewards, experience.values, mask, gamma=self.gamma, lam=self.lam)
        # Before whitening: the value model learns the returns on their own scale.
        returns = (advantages + experience.values) * mask
        if self.whiten_advantages:
            advantages = whiten(advantages, mask)
        return {"advantages": advantages, "returns": torch.nan_to_num(returns)}

"""PPO: token-level advantages by GAE from a learned value, several clipped updates a rollout."""

from typing import Any

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
from ms_align.settings import a_path, flag, number, whole
from ms_align.trainers.frame.online import OnlineTrainer


@frozen(kw_only=True, slots=False)
class PPOTrainer(OnlineTrainer):
    """Optimise a reward by PPO.

    `PPOTrainer(policy_model=policy, reward_model=reward, kl_coeff=0.2).optimize(prompts)` begins;
    every setting is a keyword. Nothing starts before `optimize`.

    Raises:
        ConfigError: a setting is of the wrong kind or out of range.
    """

    algorithm = "ppo"

    value_model: Any = field(default=None, validator=a_path(optional=True, objects=True))
    """What estimates values: None for a head on the policy's own hidden states, `"copy"` for a
    model of its own that begins as the policy and whose weights are all trained, with `lora` too; a
    module, a folder, or an Engine with a head
    `value`."""
    epochs: int = field(default=4, validator=whole())
    """Passes over one rollout."""
    kl_coeff: float = field(default=0.05, validator=number())
    gamma: float = field(default=1.0, validator=number(most=1.0))
    """Discount a token."""
    lam: float = field(default=0.95, validator=number(most=1.0))
    """λ of GAE."""
    value_coeff: float = field(default=0.1, validator=number())
    """Weight of the value's loss where it shares the policy's model."""
    value_clip: float | None = field(default=0.2, validator=number(optional=True))
    """How far a value may move from the one of the rollout; None does not clip."""
    whiten_advantages: bool = field(default=True, validator=flag)
    """Give the advantages of a rollout a mean of 0 and a deviation of 1."""
    whiten_rewards: bool = field(default=False, validator=flag)
    """Divide rewards by their deviation; their mean stays."""

    def heads(self) -> dict[str, int]:
        """Return a value head, where the policy's model bears it."""
        return {"value": 1} if self.value_model is None else {}

    def value_engine(self, policy: Engine) -> Engine:
        """Return the policy's engine, or build one for a value model of its own."""
        model: Any = self.value_model
        if model is None:
            return policy
        if model == "copy" and self.layout is not None:
            model = self.policy_model  # a split model is not copied but read once more
        elif model == "copy":
            if not isinstance(policy, LocalEngine):
                raise ConfigError(
                    "this engine's policy cannot be copied; give value_model= an Engine"
                )
            model = merged_copy(policy.module)
        return self.start_engine(model, heads={"value": 1})

    def loss(self, kl_coeff: float) -> PPOLoss:
        """Build the clipped losses."""
        return PPOLoss(
            **self.surrogate(kl_coeff),
            value_coeff=self.value_coeff if self.value_model is None else 0.0,
            value_clip=self.value_clip,
        )

    def value_loss(self) -> Loss | None:
        """Build the value's loss, where its model is its own."""
        return None if self.value_model is None else ValueLoss(clip=self.value_clip)

    def advantages(self, experience: Experience, kl_coeff: float) -> dict[str, Tensor]:
        """Compute advantages and returns, (N, S)."""
        assert experience.values is not None
        mask = experience.mask
        rewards = token_rewards(experience, kl_coeff, self.kl_estimator)
        if self.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        found = gae(rewards, experience.values, mask, gamma=self.gamma, lam=self.lam)
        returns = (found + experience.values) * mask
        if self.whiten_advantages:
            found = whiten(found, mask)
        return {"advantages": found, "returns": torch.nan_to_num(returns)}

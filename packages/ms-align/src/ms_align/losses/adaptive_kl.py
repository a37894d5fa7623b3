"""Adaptive KL coefficient of PPO. This module does not import torch."""

from attrs import frozen

from ms_align.errors import ConfigError


@frozen(kw_only=True)
class AdaptiveKL:
    """Controller that adapts β towards a target KL.

    β ← β · (1 + clip(KL/target - 1, ±0.2) · n/horizon), after n responses
    (Ziegler et al., 2019, section 2.2).
    """

    target: float
    """Target KL per response in nats, summed over its tokens."""
    horizon: int = 10_000
    """Number of responses over which a relative error of 1 would change β by a factor of e."""

    def __attrs_post_init__(self) -> None:
        if not (self.target > 0 and self.horizon >= 1):
            raise ConfigError(
                f"kl_target must be above 0 and kl_horizon at least 1, got {self.target} and "
                f"{self.horizon}; raise them"
            )

    def next(self, coefficient: float, measured: float, responses: int) -> float:
        """Return the next coefficient after `responses` responses with mean KL `measured`."""
        # The clip limits the change of one rollout, whose KL estimate is noisy.
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error * responses / self.horizon)

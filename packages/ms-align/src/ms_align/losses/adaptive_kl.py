"""The adaptive KL coefficient of PPO; importing it needs no torch."""

from attrs import frozen

from ms_align.errors import ConfigError


@frozen(kw_only=True)
class AdaptiveKL:
    """A controller that moves β so that the measured KL comes to a target.

    β ← β · (1 + clip(KL/target - 1, ±0.2) · n/horizon), after n responses
    (Ziegler et al., 2019, section 2.2).
    """

    target: float
    """KL of a response, in nats, summed over its tokens."""
    horizon: int = 10_000
    """Responses over which an error of 1 moves β by a factor of e."""

    def __attrs_post_init__(self) -> None:
        if not (self.target > 0 and self.horizon >= 1):
            raise ConfigError(
                f"kl_target is {self.target} and kl_horizon {self.horizon}; give a KL above 0 and "
                "at least 1 response"
            )

    def next(self, coefficient: float, measured: float, responses: int) -> float:
        """Compute the coefficient that follows `responses` responses of mean KL `measured`."""
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        return coefficient * (1.0 + error * responses / self.horizon)

"""Settings of rollouts, and of the updates that each is used for."""

import math
from typing import Literal

from attrs import field, fields, frozen

from ms_align.errors import ConfigError
from ms_align.generation.sampling import Sampling
from ms_align.losses.adaptive_kl import AdaptiveKL
from ms_align.settings import flag, number, one_of, whole

IN_LOSS = ("k2", "k3", "k3_weighted", "k1_to_go")


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class RolloutOptions(Sampling):
    """Rollouts, and the updates that each is used for."""

    batch_size: int = field(default=64, validator=whole())
    """Responses of one rollout, over all processes."""
    minibatch_size: int | None = field(default=None, validator=whole(optional=True))
    """Responses of one update; all of the rollout by default."""
    group_size: int = field(default=1, validator=whole())
    """Responses to each prompt."""
    epochs: int = field(default=1, validator=whole())
    """Passes over one rollout."""
    kl_coeff: float = field(default=0.0, validator=number())
    """How much a nat of KL from the reference costs."""
    kl_in: Literal["reward", "loss"] = field(default="reward", validator=one_of("reward", "loss"))
    """Where the KL stands: in the `reward` or in the `loss`."""
    kl_estimator: str = "k1"
    """`k1`, `k2` or `k3` in the reward; `k2`, `k3`, `k3_weighted` or `k1_to_go` in the loss."""
    kl_target: float | None = field(default=None, validator=number(optional=True))
    """KL of a response in nats that the coefficient is moved towards, from a `kl_coeff` above 0;
    None keeps it."""
    kl_horizon: int = field(default=10_000, validator=whole())
    """Responses over which the coefficient moves towards `kl_target`."""
    entropy_coeff: float = field(default=0.0, validator=number())
    """How much a nat of entropy of the policy is worth."""
    clip_low: float = field(default=0.2, validator=number())
    """A ratio below 1 minus this gains nothing."""
    clip_high: float = field(default=0.2, validator=number())
    """A ratio above 1 plus this gains nothing."""
    missing_stop_penalty: float = field(default=0.0, validator=number())
    """Taken from the reward of a response that its length ended."""
    length_penalty: float = field(default=0.0, validator=number())
    """Taken from the reward for each token of a response."""
    reward_clip: float | None = field(default=None, validator=number(optional=True))
    """Rewards are held within plus and minus it."""
    on_reward_failure: Literal["stop", "skip", "penalise"] = field(
        default="stop", validator=one_of("stop", "skip", "penalise")
    )
    """What a reward that fails does: `stop` the run, `skip` the sample, or `penalise` it."""
    reward_failure_penalty: float = field(default=-1.0, validator=number(least=-math.inf))
    """The reward of a sample that is penalised."""
    equal_rewards_limit: int = field(default=10, validator=whole())
    """Rollouts in a row of which nothing can be learned, after which the run is refused."""
    recompute_logprobs: bool = field(default=False, validator=flag)
    """Ask the training forward for the log-probabilities of a rollout; always so where the
    generator keeps none."""
    evaluate_samples: int = field(default=3, validator=whole(least=0))
    """Held-out samples that are shown at each evaluation."""

    def __attrs_post_init__(self) -> None:
        size = self.minibatch_size or self.batch_size
        if self.batch_size % size:
            raise ConfigError(
                f"batch_size {self.batch_size} does not divide into minibatches of {size}; choose "
                "a minibatch_size that divides it"
            )
        if self.batch_size % self.group_size:
            raise ConfigError(
                f"batch_size {self.batch_size} does not divide into groups of {self.group_size}; "
                "choose a group_size that divides it"
            )
        allowed = ("k1", "k2", "k3") if self.kl_in == "reward" else IN_LOSS
        if self.kl_estimator not in allowed:
            raise ConfigError(
                f"kl_estimator is {self.kl_estimator!r} with the KL in the {self.kl_in}; give one "
                f"of {', '.join(allowed)}"
            )
        if self.kl_target is not None:
            self.controller  # noqa: B018 - its own checks
            if not self.kl_coeff:
                raise ConfigError(
                    f"kl_target is {self.kl_target} and kl_coeff 0, of which any multiple is 0; "
                    "give a kl_coeff above 0 to begin with"
                )

    @property
    def sampling(self) -> Sampling:
        """How responses are drawn."""
        given = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        return Sampling(**{**given, "stop_tokens": self.stop_tokens or ()})

    @property
    def controller(self) -> AdaptiveKL | None:
        """What moves the KL's coefficient; None keeps it."""
        if self.kl_target is None:
            return None
        return AdaptiveKL(target=self.kl_target, horizon=self.kl_horizon)

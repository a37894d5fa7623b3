"""Settings of rollouts and of the policy updates."""

import math
from functools import cached_property
from typing import Any, ClassVar, Literal

from attrs import Attribute, field, fields, frozen

from ms_align.errors import ConfigError
from ms_align.generation.sampling import Sampling
from ms_align.losses.adaptive_kl import AdaptiveKL
from ms_align.settings import flag, integer, number, one_of
from ms_align.used_settings import UsedIf

REJECTIONS = ("token_k1", "token_k3", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k3")
IN_LOSS = ("k2", "k3", "k3_weighted", "k1_to_go")


def _check_rejection(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a name of `REJECTIONS`, or None."""
    if value is not None:
        one_of(*REJECTIONS)(instance, attribute, value)


def _check_threshold(instance: Any, attribute: "Attribute[Any]", value: object) -> None:
    """Require a threshold if and only if `rollout_rs` is set, and above 1 for ratios."""
    number(optional=True)(instance, attribute, value)
    if (value is None) != (instance.rollout_rs is None):
        raise ConfigError(
            f"rollout_rs_threshold and rollout_rs must be set together, got {value} and "
            f"{instance.rollout_rs!r}; set both or neither"
        )
    if value is not None and instance.rollout_rs.endswith("k1"):
        number(minimum=1.0)(instance, attribute, value)


@frozen(kw_only=True, slots=False)  # trainers inherit from more than one
class RolloutOptions(Sampling):
    """Rollouts and updates."""

    batch_size: int = field(default=64, validator=integer())
    """Responses per rollout, over all processes."""
    minibatch_size: int | None = field(default=None, validator=integer(optional=True))
    """Responses per update. Default: the entire rollout."""
    num_generations: int = field(default=1, validator=integer())
    """Responses per prompt."""
    epochs: int = field(default=1, validator=integer())
    """Passes over each rollout."""
    kl_coeff: float = field(default=0.0, validator=number())
    """Coefficient of the KL penalty (per nat)."""
    kl_in: Literal["reward", "loss"] = field(default="reward", validator=one_of("reward", "loss"))
    """Add the KL penalty to the `reward` or to the `loss`."""
    kl_estimator: str = "k1"
    """KL estimator: `k1`, `k2` or `k3` in the reward; `k2`, `k3`, `k3_weighted` or `k1_to_go` in
    the loss."""
    kl_target: float | None = field(default=None, validator=number(optional=True))
    """Target KL per response in nats, towards which `kl_coeff` is adapted; it must start above 0.
    None: constant coefficient."""
    kl_horizon: int = field(default=10_000, validator=integer())
    """Responses over which `kl_coeff` adapts to `kl_target`."""
    entropy_coeff: float = field(default=0.0, validator=number())
    """Coefficient of the entropy bonus (per nat)."""
    clip_low: float = field(default=0.2, validator=number())
    """Lower PPO clip range: ratios below 1 - clip_low get no gradient."""
    clip_high: float = field(default=0.2, validator=number())
    """Upper PPO clip range: ratios above 1 + clip_high get no gradient."""
    missing_eos_penalty: float = field(default=0.0, validator=number())
    """Penalty for a response that was cut at its maximum length."""
    length_penalty: float = field(default=0.0, validator=number())
    """Penalty per token of a response."""
    soft_punish_cache: int | None = field(default=None, validator=integer(optional=True))
    """DAPO's soft overlong penalty: over this many tokens before max_new_tokens, it grows from 0
    to 1. None: no penalty."""
    reward_clip: float | None = field(default=None, validator=number(optional=True))
    """Clip rewards to plus or minus this value."""
    on_reward_failure: Literal["stop", "skip", "penalize"] = field(
        default="stop", validator=one_of("stop", "skip", "penalize")
    )
    """If a reward fails: `stop` the run, `skip` the sample, or `penalize` it."""
    reward_failure_penalty: float = field(default=-1.0, validator=number(minimum=-math.inf))
    """Reward of a penalized sample."""
    equal_rewards_limit: int = field(default=10, validator=integer())
    """Rollouts in a row with equal rewards in every group after which the run fails."""
    max_staleness: int = field(default=0, validator=integer(minimum=0, maximum=1000))
    """Maximum number of updates by which generation runs ahead of training: rollouts are generated
    in the background with weights that are this many updates old when the rollout is first used.
    0: generation and updates alternate."""
    recompute_logprobs: bool = field(default=False, validator=flag)
    """Recompute rollout log-probabilities with a training forward pass; always done if the
    generator does not return the policy's."""
    importance_sampling_correction: bool = field(default=True, validator=flag)
    """Weight losses by the ratio of the policy's to the sampler's probabilities, for rollouts from
    servers or earlier weights."""
    importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = field(
        default="sequence_mask",
        validator=one_of("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    """Ratios of each `token` or `sequence`, and `truncate` or `mask` those outside the limits:
    `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`."""
    importance_sampling_clip_min: float | None = field(
        default=None, validator=number(optional=True)
    )
    """Lower limit of these ratios. Default: none."""
    importance_sampling_clip_max: float | None = field(
        default=3.0, validator=number(minimum=1.0, optional=True)
    )
    """Upper limit of these ratios."""
    rollout_rs: (
        Literal["token_k1", "token_k3", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k3"]
        | None
    ) = field(default=None, validator=_check_rejection)
    """Reject tokens or sequences by their ratio r of the policy's to the sampler's probabilities,
    as in verl: `token_k1`, `token_k3`, `seq_sum_k1`, `seq_mean_k1` (the geometric mean),
    `seq_mean_k3` or `seq_max_k3`, where k1 is log r and k3 is r - 1 - log r. Default: none."""
    rollout_rs_threshold: float | None = field(default=None, validator=_check_threshold)
    """Limit of `rollout_rs`: for k1, ratios outside 1 / limit to limit are rejected, for k3 values
    above the limit."""
    off_policy_mask_threshold: float | None = field(default=None, validator=number(optional=True))
    """Reject responses with a negative advantage whose mean of log(sampler / policy) is above this,
    in nats per token. Default: none."""
    bypass_mode: bool = field(default=False, validator=flag)
    """Clip the ratio of the policy to the sampler, instead of clipping the ratio to the policy at
    the start of the rollout's updates and weighting by that policy's ratio to the sampler."""
    router_replay: bool = field(default=False, validator=flag)
    """For MoE models: in updates, route each token to the experts selected when it was sampled."""
    max_logprob_difference: float = field(default=0.2, validator=number())
    """For rollouts from servers: fail the run if the log-probabilities of the server and the policy
    for the same weights differ by more than this mean, in nats per token."""
    eval_samples: int = field(default=3, validator=integer(minimum=0))
    """Held-out samples shown at each evaluation."""

    used_if: ClassVar[tuple[UsedIf, ...]] = (
        UsedIf("kl_horizon", "with kl_target", lambda run: run.kl_target is not None),
        UsedIf(
            "reward_failure_penalty",
            "with on_reward_failure='penalize'",
            lambda run: run.on_reward_failure == "penalize",
        ),
        UsedIf(
            "importance_sampling_mode importance_sampling_clip_min importance_sampling_clip_max",
            "with importance_sampling_correction=true",
            lambda run: run.importance_sampling_correction,
        ),
        UsedIf("rollout_rs_threshold", "with rollout_rs", lambda run: run.rollout_rs is not None),
        UsedIf(
            "max_logprob_difference",
            "with rollouts from servers",
            lambda run: run.generator != "policy",
        ),
    )

    def __attrs_post_init__(self) -> None:
        size = self.minibatch_size or self.batch_size
        if self.batch_size % size:
            raise ConfigError(
                f"batch_size {self.batch_size} must be divisible by minibatch_size {size}; change "
                "minibatch_size"
            )
        if self.batch_size % self.num_generations:
            raise ConfigError(
                f"batch_size {self.batch_size} must be divisible by num_generations"
                f" {self.num_generations}; "
                "change num_generations"
            )
        low, high = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if low is not None and low > 1:
            raise ConfigError(
                f"importance_sampling_clip_min must be at most 1, the ratio of equal models, got "
                f"{low}; lower it"
            )
        if low is None and high is None and self.importance_sampling_mode.endswith("truncate"):
            raise ConfigError(
                f"importance_sampling_mode={self.importance_sampling_mode!r} needs a limit; set "
                "importance_sampling_clip_max"
            )
        if self.soft_punish_cache is not None and self.soft_punish_cache > self.max_new_tokens:
            raise ConfigError(
                f"soft_punish_cache must be at most max_new_tokens, {self.max_new_tokens}, got "
                f"{self.soft_punish_cache}; lower it"
            )
        allowed = ("k1", "k2", "k3") if self.kl_in == "reward" else IN_LOSS
        if self.kl_estimator not in allowed:
            raise ConfigError(
                f"kl_estimator must be {', '.join(allowed)} with the KL in the {self.kl_in}, got "
                f"{self.kl_estimator!r}; change it or kl_in"
            )
        if self.kl_target is not None:
            self.controller  # noqa: B018 - runs the controller's own checks
            if not self.kl_coeff:
                raise ConfigError(
                    f"kl_target={self.kl_target} needs kl_coeff > 0, as the controller rescales it "
                    "by a factor; set a kl_coeff to start from"
                )

    @property
    def max_response_tokens(self) -> int:
        """Maximum length of a response; trainers with tools count all turns of an episode."""
        return self.max_new_tokens

    @cached_property
    def sampling(self) -> Sampling:
        """Sampling settings."""
        settings = {item.name: getattr(self, item.name) for item in fields(Sampling)}
        return Sampling(**{**settings, "stop_token_ids": self.stop_token_ids or ()})

    @property
    def controller(self) -> AdaptiveKL | None:
        """Controller of the KL coefficient; None for a constant coefficient."""
        if self.kl_target is None:
            return None
        return AdaptiveKL(target=self.kl_target, horizon=self.kl_horizon)


@frozen(kw_only=True, slots=False)
class GroupOptions:
    """Groups of responses to the same prompt."""

    max_resample_times: int = field(default=0, validator=integer(minimum=0))
    """DAPO's dynamic sampling: replace groups with equal rewards, which teach nothing, by groups of
    other prompts. Maximum number of additional batches of prompts per rollout; 0: keep them."""
    pass_at_k: int = field(default=1, validator=integer(minimum=1))
    """Maximize the best reward of k responses instead of the mean reward; below
    num_generations."""

    def check_group_size(self, num_generations: int) -> None:
        """Check that a group has more responses than `pass_at_k`.

        Raises:
            ConfigError: it does not, so all advantages would be 0.
        """
        if 1 < self.pass_at_k >= num_generations:
            raise ConfigError(
                f"pass_at_k must be below num_generations, {num_generations}, got "
                f"{self.pass_at_k}; lower it or raise num_generations"
            )

"""Estimators of KL(policy ‖ reference) from sampled tokens, and controllers of its coefficient.

Write w for the log-ratio log π(y) - log q(y) of a sampled token under policy π and reference q
(Schulman, 2020, "Approximating KL divergence"). What an estimator is worth as a value and what its
gradient is worth are two questions:

| estimator | per token | in the reward | in the loss |
|---|---|---|---|
| `k1` | w | the gradient of KL | no gradient at all: it averages to 0 |
| `k2` | w² / 2 | biased | the gradient of each token's KL where π drew the tokens |
| `k3` | exp(-w) - 1 + w | biased | that of the *reverse* KL(q ‖ π) |
| `k3_weighted` | π/μ · k3 | | the gradient of each token's KL, also if μ ≠ π drew the tokens |
| `k1_to_go` | π/μ · Σ later k1 | | the gradient of the whole response's KL where π drew it |

The tests hold each against the exact gradient by enumeration; the guide prints the table.
"""

from typing import Literal

import torch
from torch import Tensor

from ms_align.errors import ConfigError

Estimator = Literal["k1", "k2", "k3"]
LossEstimator = Literal["k2", "k3", "k3_weighted", "k1_to_go"]


def estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Compute the value of an estimator for each token.

    Args:
        logprobs: (B, T) float32, of the policy.
        reference_logprobs: (B, T) float32, of the reference.
        estimator: `k1`, `k2` or `k3`.

    Returns:
        (B, T). `k1` may be negative for a token, as its mean over many is not; `k2`, `k3` never.

    Raises:
        ConfigError: there is no such estimator.
    """
    ratio = logprobs - reference_logprobs
    if estimator == "k1":
        return ratio
    if estimator == "k2":
        return 0.5 * ratio.square()
    if estimator == "k3":
        return torch.expm1(-ratio) + ratio
    raise ConfigError(f"there is no KL estimator {estimator!r}; give 'k1', 'k2' or 'k3'")


def in_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    estimator: str,
) -> Tensor:
    """Compute what to add, times β, to each token's loss, so that its gradient is the KL's.

    Args:
        logprobs: (B, T) float32, of the policy being trained; takes the gradient.
        reference_logprobs: (B, T).
        old_logprobs: (B, T), of the policy that drew the tokens.
        mask: (B, T), the response's own tokens.
        estimator: a `LossEstimator`; see the table above for what each is worth.

    Returns:
        (B, T), 0 where nothing counts.

    Raises:
        ConfigError: there is no such estimator, or it has no gradient.
    """
    counted = mask.to(logprobs.dtype)
    if estimator in ("k2", "k3"):
        return estimate(logprobs, reference_logprobs, estimator) * counted
    weight = torch.exp(logprobs - old_logprobs)
    if estimator == "k3_weighted":
        return weight * estimate(logprobs, reference_logprobs, "k3") * counted
    if estimator == "k1_to_go":
        ratios = (logprobs - reference_logprobs).detach() * counted
        to_go = ratios.flip(1).cumsum(1).flip(1)
        return weight * to_go * counted
    if estimator == "k1":
        raise ConfigError(
            "k1 in the loss has a gradient of 0 on average, so it would not hold the policy near "
            "the reference; use 'k2' or 'k3_weighted', or k1 in the reward"
        )
    raise ConfigError(
        f"there is no KL estimator {estimator!r} for the loss; give 'k2', 'k3', 'k3_weighted' or "
        "'k1_to_go'"
    )

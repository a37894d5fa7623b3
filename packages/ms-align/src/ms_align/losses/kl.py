"""Estimators of KL(policy ‖ reference) from sampled tokens, and the adaptive KL controller.

Let w = log π(y) - log q(y) be the log-ratio of a sampled token under the policy π and the
reference q (Schulman, 2020, "Approximating KL divergence"), and μ the policy that sampled it. A
good estimate of the value may have a useless gradient:

| estimator | per token | in the reward | in the loss |
|---|---|---|---|
| `k1` | w | gradient of the KL | no gradient: it averages to 0 |
| `k2` | w² / 2 | biased | gradient of each token's KL if μ = π |
| `k3` | exp(-w) - 1 + w | biased | gradient of the *reverse* KL(q ‖ π) |
| `k3_weighted` | π/μ · k3 | | gradient of each token's KL, also if μ ≠ π |
| `k1_to_go` | π/μ · Σ later k1 | | gradient of the whole response's KL if μ = π |

The tests compare each estimator with the exact gradient, computed by enumeration.
"""

from typing import Literal

import torch
from torch import Tensor

from ms_align.arguments import shown
from ms_align.errors import ConfigError

Estimator = Literal["k1", "k2", "k3"]
LossEstimator = Literal["k2", "k3", "k3_weighted", "k1_to_go"]


def estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Compute a per-token KL estimate.

    Args:
        logprobs: (B, T) float32, under the policy.
        reference_logprobs: (B, T) float32, under the reference.
        estimator: `k1`, `k2` or `k3`.

    Returns:
        (B, T). `k1` may be negative for single tokens; `k2` and `k3` are never negative.

    Raises:
        ConfigError: the estimator is unknown.
    """
    log_ratio = logprobs - reference_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ConfigError(
        f"the KL estimator must be 'k1', 'k2' or 'k3', got {shown(estimator)}; use one"
    )


def loss_term(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    estimator: str,
) -> Tensor:
    """Compute the KL term of each token's loss, before multiplication by β.

    Args:
        logprobs: (B, T) float32, under the policy being trained; receives the gradient.
        reference_logprobs: (B, T), under the reference.
        old_logprobs: (B, T), under the policy that sampled the tokens.
        mask: (B, T), response tokens.
        estimator: a `LossEstimator`; see the table above.

    Returns:
        (B, T), 0 where masked.

    Raises:
        ConfigError: the estimator is unknown or has no gradient.
    """
    weights = mask.to(logprobs.dtype)
    if estimator in ("k2", "k3"):
        return estimate(logprobs, reference_logprobs, estimator) * weights
    # Importance ratio π/μ. At the first update it is 1, but it carries the gradient of log π.
    ratio = torch.exp(logprobs - old_logprobs)
    if estimator == "k3_weighted":
        return ratio * estimate(logprobs, reference_logprobs, "k3") * weights
    if estimator == "k1_to_go":
        log_ratios = (logprobs - reference_logprobs).detach() * weights  # w, (B, T)
        # Σ over this and later tokens of the response: the KL that the token can still influence.
        to_go = log_ratios.flip(1).cumsum(1).flip(1)
        return ratio * to_go * weights
    if estimator == "k1":
        raise ConfigError(
            "k1 in the loss has a gradient of 0 on average, so it would not keep the policy near "
            "the reference; use 'k2' or 'k3_weighted', or kl_in='reward'"
        )
    raise ConfigError(
        "the KL estimator in the loss must be 'k2', 'k3', 'k3_weighted' or 'k1_to_go', got "
        f"{estimator!r}; use one"
    )

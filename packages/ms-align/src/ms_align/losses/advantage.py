"""Advantage estimators: GAE and REINFORCE++ per token, GRPO and RLOO per response.

Shapes: B responses, T response tokens. A mask is 1 at response tokens.
"""

from functools import cache
from math import comb

import torch
from torch import Tensor

from ms_align.arguments import check_number, check_type, shown
from ms_align.errors import ConfigError


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """Compute generalized advantage estimates (Schulman et al., 2016, equation 16).

    A_t = δ_t + gamma·λ·A_{t+1} with δ_t = r_t + gamma·V_{t+1} - V_t. After the last unmasked token
    of a row, the next value and advantage are 0. Masked tokens are skipped wherever they are, so
    left and right padding give the same result.

    Args:
        rewards: (B, T) float, reward for the action at token t.
        values: (B, T) float, expected return before token t.
        mask: (B, T) bool or 0/1; 1 at response tokens.
        gamma: discount factor per token, 0 to 1.
        lam: λ, 0 (one-step TD) to 1 (Monte Carlo returns).

    Returns:
        (B, T) in the dtype of `rewards`; 0 where masked. No gradient flows to the values.

    Raises:
        ValueError: shapes differ.
    """
    for name, tensor in (("rewards", rewards), ("values", values), ("mask", mask)):
        check_type(name, tensor, Tensor, "a tensor (B, T)", error=ConfigError)
    check_number("gamma", gamma, minimum=0, error=ConfigError)
    check_number("lam", lam, minimum=0, error=ConfigError)
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask "
            f"{tuple(mask.shape)} must have the same shape (B, T)"
        )
    is_response = mask.bool()
    values = values.detach()
    advantages = torch.zeros_like(rewards)
    # (B,), 0 after the last token
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    # Backward recursion. At masked tokens the carried values pass through unchanged, so they always
    # belong to the next response token, however much padding is in between.
    for t in range(rewards.shape[1] - 1, -1, -1):
        active = is_response[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # TD error, (B,)
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(active, values[:, t], next_value)
        next_advantage = torch.where(active, advantage, next_advantage)
        advantages[:, t] = torch.where(active, advantage, advantages[:, t])
    return advantages


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, a scalar; NaN if the mask is empty."""
    return (x * mask).sum() / mask.sum()


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Compute (x - mean) / √(variance + ε) over the mask, with Bessel's correction; 0 elsewhere.

    Args:
        x: (B, T) float.
        mask: (B, T); with fewer than two elements only the mean is subtracted.
        shift_mean: False keeps the mean, as is usual for rewards.
        epsilon: added to the variance.
    """
    weights = mask.to(x.dtype)
    mean = masked_mean(x, weights)
    centered = x - mean
    count = weights.sum()
    variance = (centered.square() * weights).sum() / (count - 1).clamp(min=1)
    # A single element has no variance and is only shifted.
    scaled = centered * torch.rsqrt(variance + epsilon) if count > 1 else centered
    return (scaled if shift_mean else scaled + mean) * weights


def group_relative(
    rewards: Tensor, num_generations: int, *, scale: str = "group", epsilon: float = 1e-4
) -> Tensor:
    """Compute GRPO advantages: reward minus the group mean, optionally divided by a deviation.

    Args:
        rewards: (B,) float; the responses of a group are adjacent. NaN rewards are ignored in all
            statistics, and their advantage is 0.
        num_generations: responses per prompt; divides B.
        scale: divisor: `"group"`, the group's standard deviation + ε (Shao et al., 2024);
            `"batch"`, the batch's; `"mean"`, the group's mean reward (Tajwar et al., 2026,
            "MaxRL"), for rewards of at least 0; `"none"` (Liu et al., 2025, "Dr. GRPO").
        epsilon: added to the standard deviation.

    Returns:
        (B,); 0 in a group whose rewards are equal or which has fewer than two valid rewards.

    Raises:
        ValueError: `num_generations` does not divide B, or `scale` is unknown.
    """
    groups, valid = _groups(rewards, num_generations)
    count = valid.sum(dim=1, keepdim=True)  # (prompts, 1)
    # Rewards minus the mean of the group's valid rewards; 0 for invalid ones.
    centered = (groups - groups.sum(dim=1, keepdim=True) / count.clamp(min=1)) * valid
    if scale == "group":
        # Bessel's correction over valid rewards only, as torch.std without NaN.
        variance = centered.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + epsilon)
    elif scale == "batch":
        centered = centered / (groups[valid].std() + epsilon) if valid.sum() > 1 else centered
    elif scale == "mean":
        mean = groups.sum(dim=1, keepdim=True) / count.clamp(min=1)
        centered = torch.where(mean > 0, centered / mean.clamp(min=1e-12), 0.0)
    elif scale != "none":
        raise ValueError(f"scale must be 'group', 'batch', 'mean' or 'none', got {shown(scale)}")
    return centered.flatten()


def leave_one_out(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute RLOO advantages: reward minus the mean of the group's others (Ahmadian et al. 2024).

    Args:
        rewards: (B,) float; the responses of a group are adjacent. NaN rewards are ignored, and
            their advantage is 0.
        num_generations: responses per prompt, at least 2; divides B.

    Returns:
        (B,); 0 in a group with fewer than two valid rewards.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    groups, valid = _groups(rewards, num_generations)
    others = valid.sum(dim=1, keepdim=True) - 1
    # NaN is 0 in `groups`, so the sum is over valid rewards.
    # (prompts, num_generations)
    mean = (groups.sum(dim=1, keepdim=True) - groups) / others.clamp(min=1)
    return torch.where(valid & (others > 0), groups - mean, 0.0).flatten()


def best_of_k(rewards: Tensor, num_generations: int, k: int) -> Tensor:
    """Compute each response's expected best reward in a random set of k responses of its group.

    The set always includes the response itself. With these in place of rewards, GRPO and RLOO
    maximize the best of k responses instead of the mean reward; with rewards of 0 and 1 this is
    pass@k (Chen et al., 2025, "Pass@k Training", who divide by the deviation over sets instead of
    responses). The expected gradient is the gradient of the best of k, times (n - k)/(k·n) if the
    group's mean is subtracted and n responses are averaged.

    Args:
        rewards: (B,) float; the responses of a group are adjacent. NaN rewards are ignored.
        num_generations: responses per prompt, n; divides B.
        k: size of the sets, at least 1. With k or fewer valid rewards in a group, all are equal.

    Returns:
        (B,); NaN where the reward is NaN.

    Raises:
        ValueError: `num_generations` does not divide B.
    """
    groups, valid = _groups(rewards, num_generations)
    best = torch.full_like(groups, torch.nan)
    for row, is_valid in enumerate(valid):
        values, order = groups[row, is_valid].sort()
        if len(values):
            weights = values.new_tensor(_best_weights(len(values), min(k, len(values))))
            best[row, is_valid] = torch.empty_like(values).scatter(0, order, weights @ values)
    return best.flatten()


@cache
def _best_weights(count: int, k: int) -> list[list[float]]:
    """Probability that sorted response j is the best of a set with response i, (count, count)."""
    sets = comb(count - 1, k - 1)
    return [
        [
            # i is the best if the k - 1 others are below it; j > i if k - 2 others are below j.
            (comb(i, k - 1) if j == i else comb(j - 1, k - 2) if j > i and k > 1 else 0) / sets
            for j in range(count)
        ]
        for i in range(count)
    ]


def returns_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """Sum the rewards (B, S) from each response token to the end of its row; 0 where masked."""
    rewards = rewards * mask
    return rewards.flip(1).cumsum(1).flip(1) * mask


def has_baseline(rewards: Tensor, num_generations: int) -> Tensor:
    """Return True for valid rewards (B,) with another valid reward in their group, (B,) bool."""
    valid = _groups(rewards, num_generations)[1]
    return (valid & (valid.sum(dim=1, keepdim=True) > 1)).flatten()


def _groups(rewards: Tensor, num_generations: int) -> tuple[Tensor, Tensor]:
    """Return rewards (prompts, num_generations), with 0 for NaN, and the mask of valid ones."""
    if rewards.ndim != 1 or num_generations < 2 or rewards.shape[0] % num_generations:
        raise ValueError(
            f"{tuple(rewards.shape)} rewards must be (B,) with B divisible by num_generations "
            f"{num_generations}, at least 2"
        )
    groups = rewards.view(-1, num_generations)
    valid = ~groups.isnan()
    return groups.masked_fill(~valid, 0.0), valid

"""Advantages: how much better than expected each token, or each response of a group, did.

Shapes: B responses, T response tokens; a mask is 1 where a token is the response's own.
"""

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """Compute generalised advantage estimates (Schulman et al., 2016, equation 16).

    A_t = δ_t + gamma·λ·A_{t+1} with δ_t = r_t + gamma·V_{t+1} - V_t. After a row's last counted
    token comes nothing: its next value and advantage are 0. Tokens that are not counted are
    skipped over, wherever they lie, so left and right padding give the same.

    Args:
        rewards: (B, T) float, of the step from token t.
        values: (B, T) float, expected return before token t.
        mask: (B, T) bool or 0/1; which tokens count.
        gamma: discount a token, 0 to 1.
        lam: λ, 0 (one step) to 1 (whole returns).

    Returns:
        (B, T) in the dtype of `rewards`; 0 where nothing counts. Values take no gradient from it.

    Raises:
        ValueError: shapes differ.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.ndim != 2:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask "
            f"{tuple(mask.shape)} differ; give three of one shape (B, T)"
        )
    counted = mask.bool()
    values = values.detach()
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = counted[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(here, values[:, t], next_value)
        next_advantage = torch.where(here, advantage, next_advantage)
        advantages[:, t] = torch.where(here, advantage, advantages[:, t])
    return advantages


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of the counted elements, a scalar; NaN where none is."""
    return (x * mask).sum() / mask.sum()


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, epsilon: float = 1e-8) -> Tensor:
    """Compute (x - mean) / √(variance + ε) over counted elements, variance with n - 1; 0 elsewhere.

    Args:
        x: (B, T) float.
        mask: (B, T); which elements count. Fewer than two are only shifted.
        shift_mean: False leaves the mean where it was, as is usual for rewards.
        epsilon: added to the variance.
    """
    counted = mask.to(x.dtype)
    mean = masked_mean(x, counted)
    centred = x - mean
    count = counted.sum()
    variance = (centred.square() * counted).sum() / (count - 1).clamp(min=1)
    scaled = centred * torch.rsqrt(variance + epsilon) if count > 1 else centred
    return (scaled if shift_mean else scaled + mean) * counted


def group_relative(
    rewards: Tensor, group_size: int, *, scale: str = "group", epsilon: float = 1e-4
) -> Tensor:
    """Compute GRPO's advantages: reward minus its group's mean, by choice over a deviation.

    Args:
        rewards: (B,) float; groups are neighbours. NaN is left out: it counts in no mean,
            deviation or number, and its advantage is 0.
        group_size: responses to one prompt; divides B.
        scale: `"group"` divides by the group's deviation + ε (Shao et al., 2024), `"batch"` by the
            batch's, `"none"` does not divide (Liu et al., 2025, "Dr. GRPO").
        epsilon: added to the deviation.

    Returns:
        (B,); 0 throughout a group whose rewards are equal, or of which fewer than two are left.

    Raises:
        ValueError: the size does not divide the rewards, or the scale is unknown.
    """
    groups, kept = _groups(rewards, group_size)
    count = kept.sum(dim=1, keepdim=True)
    centred = (groups - groups.sum(dim=1, keepdim=True) / count.clamp(min=1)) * kept
    if scale == "group":
        variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + epsilon)
    elif scale == "batch":
        centred = centred / (groups[kept].std() + epsilon) if kept.sum() > 1 else centred
    elif scale != "none":
        raise ValueError(f"scale is {scale!r}; give 'group', 'batch' or 'none'")
    return centred.flatten()


def leave_one_out(rewards: Tensor, group_size: int) -> Tensor:
    """Compute RLOO's advantages: reward less the mean of its group's others (Ahmadian et al. 2024).

    Args:
        rewards: (B,) float; groups are neighbours. NaN is left out, and its advantage is 0.
        group_size: responses to one prompt, at least 2; divides B.

    Returns:
        (B,); 0 throughout a group of which fewer than two are left.

    Raises:
        ValueError: the size does not divide the rewards.
    """
    groups, kept = _groups(rewards, group_size)
    others = kept.sum(dim=1, keepdim=True) - 1
    mean = (groups.sum(dim=1, keepdim=True) - groups) / others.clamp(min=1)
    return torch.where(kept & (others > 0), groups - mean, 0.0).flatten()


def compared(rewards: Tensor, group_size: int) -> Tensor:
    """Find which rewards (B,) are not NaN and have another such one in their group, (B,) bool."""
    kept = _groups(rewards, group_size)[1]
    return (kept & (kept.sum(dim=1, keepdim=True) > 1)).flatten()


def _groups(rewards: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Group rewards (B / size, size), 0 for NaN, and tell which of them are numbers."""
    if rewards.ndim != 1 or group_size < 2 or rewards.shape[0] % group_size:
        raise ValueError(
            f"{tuple(rewards.shape)} rewards do not divide into groups of {group_size}; give one "
            "reward a response and groups of at least 2"
        )
    groups = rewards.view(-1, group_size)
    kept = ~groups.isnan()
    return groups.masked_fill(~kept, 0.0), kept

"""One step of AdamW."""

from collections.abc import Callable

from torch import Tensor

from ..signatures import Single

__all__ = ["BODIES"]


def adam_w(
    weights: Tensor,
    mean: Tensor,
    square: Tensor,
    max_square: Tensor | None,
    gradient: Tensor,
    step: Tensor,
    learning_rate: Single,
    beta1: Single,
    beta2: Single,
    weight_decay: Single,
    eps: Single,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """One in-place step; `step` is the number of steps before this one."""
    if amsgrad or not weights.dtype == mean.dtype == square.dtype == gradient.dtype:
        raise ValueError("amsgrad and mixed dtypes are not implemented")
    grad = -gradient.float() if maximize else gradient.float()
    current_step = int(step.item()) + 1
    mean.copy_(beta1 * mean.float() + (1 - beta1) * grad)
    square.copy_(beta2 * square.float() + (1 - beta2) * grad * grad)
    root = (square.float() / (1 - beta2**current_step)).sqrt() + eps
    decayed = weights.float() * (1 - learning_rate * weight_decay)
    weights.copy_(decayed - learning_rate * (mean.float() / (1 - beta1**current_step)) / root)


BODIES: dict[str, Callable[..., None]] = {"aclnnApplyAdamWV2": adam_w}

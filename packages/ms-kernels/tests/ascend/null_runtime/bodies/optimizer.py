"""One step of AdamW."""

from collections.abc import Callable

from torch import Tensor

from ..signatures import Single

__all__ = ["BODIES"]


def adam_w(
    weights: Tensor,
    mean: Tensor,
    square: Tensor,
    largest: Tensor | None,
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
    """In place; `step` is the number of steps taken before this one."""
    if amsgrad or not weights.dtype == mean.dtype == square.dtype == gradient.dtype:
        raise ValueError("amsgrad and tensors of two dtypes have no body here")
    slope = -gradient.float() if maximize else gradient.float()
    taken = int(step.item()) + 1
    mean.copy_(beta1 * mean.float() + (1 - beta1) * slope)
    square.copy_(beta2 * square.float() + (1 - beta2) * slope * slope)
    root = (square.float() / (1 - beta2**taken)).sqrt() + eps
    decayed = weights.float() * (1 - learning_rate * weight_decay)
    weights.copy_(decayed - learning_rate * (mean.float() / (1 - beta1**taken)) / root)


BODIES: dict[str, Callable[..., None]] = {"aclnnApplyAdamWV2": adam_w}

"""The public function `adamw_step`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.core.split_rows import own_parts
from ms_kernels.operators.adamw_step.contract import CONTRACT


def adamw_step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """Take one step of AdamW in place (arXiv 1711.05101), as `torch.optim.AdamW` does.

    Args:
        weights: (...), written.
        gradient: (...), a floating dtype.
        mean: (...) float32 (or float64), the running mean of gradients; written.
        square: likewise, of their squares; written.
        step: 1 at the first step.
        learning_rate: of this step.
        betas: how much of mean and square stays.
        eps: added to the root of the square.
        weight_decay: share of the weights, times the learning rate, that is taken away.

    Each tensor has memory of its own: two that share a byte are refused, on every device; while
    torch.compile traces, only one that is given twice. DTensors that are split alike are stepped in
    place, each process its own part.
    """
    tensors = own_parts(CONTRACT, (weights, gradient, mean, square))
    perform(CONTRACT, tensors, (step, learning_rate, betas, eps, weight_decay))

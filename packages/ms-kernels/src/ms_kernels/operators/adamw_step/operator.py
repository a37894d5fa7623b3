"""The public function `adamw_step`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.core.split_rows import local_shards
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
        weights: parameters (...), updated in place.
        gradient: (...), a floating dtype.
        mean: first moment (...) float32 (or float64), updated in place.
        square: second moment, same shape and dtype, updated in place.
        step: step number, starting at 1.
        learning_rate: learning rate of this step.
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.

    Tensors must not share memory; under torch.compile only passing one tensor twice is detected.
    DTensors with equal placements are updated in place, each rank its local shard.
    """
    tensors = local_shards(CONTRACT, (weights, gradient, mean, square))
    perform(CONTRACT, tensors, (step, learning_rate, betas, eps, weight_decay))

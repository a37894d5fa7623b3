"""Cross-entropy of logits against class indices, with label smoothing and z-loss."""

from typing import NamedTuple

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, Option, indices, streaming
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_classes
from ms_kernels.contracts.options import ignore_index_option
from ms_kernels.contracts.values import is_number, one_of


class LossOptions(NamedTuple):
    """Options of a loss, in the order of the contract."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str

    @property
    def plain(self) -> bool:
        """Whether label smoothing and z-loss are both off."""
        return not (self.label_smoothing or self.z_loss)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return ``-(1-s) log p[target] - s mean(log p) + z log²Z``, in float32."""
    wide = logits.to(accumulator(logits.dtype))
    ignored = targets == ignore_index
    class_index = targets.masked_fill(ignored, 0).unsqueeze(-1)
    total = wide.logsumexp(-1)
    losses = total - (1 - label_smoothing) * _pick(wide, class_index)
    if label_smoothing:
        losses = losses - label_smoothing * wide.mean(-1)
    if z_loss:
        losses = losses + z_loss * total.square()
    return reduce(losses.masked_fill(ignored, 0), ignored, reduction)


def _pick(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the logits (...) of `classes` (..., 1)."""
    if type(logits) is Tensor:
        return logits.gather(-1, classes).squeeze(-1)
    # DTensor cannot gather along a sharded dim, but it can mask and sum.
    hit = torch.zeros_like(logits).scatter(-1, classes, 1.0)
    return logits.masked_fill(hit == 0, 0).sum(-1)


def reduce(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    """Sum `losses`, average them over the targets not ignored (0 if none), or return them as is."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / mean_divisor(ignored)


def mean_divisor(ignored: Tensor) -> Tensor:
    """Return the divisor of a mean loss: the number of targets not ignored, at least 1."""
    return (~ignored).sum().clamp(min=1)


def classes(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw random class indices; about one in eight is ignored."""
    targets = torch.randint(dims["V"], shape, generator=generator)
    return targets.masked_fill(torch.rand(shape, generator=generator) < 0.125, -100)


LOSS_OPTIONS = (
    ignore_index_option,
    Option(
        name="label_smoothing",
        default=0.0,
        holds=lambda value: is_number(value, 0, below=1),
        fits="a number, at least 0 and below 1",
        trials=(0.1,),
    ),
    Option(
        name="z_loss",
        default=0.0,
        holds=lambda value: is_number(value, 0),
        fits="a number, 0 or more, finite in float32",
        trials=(1e-2,),
    ),
    Option(
        name="reduction",
        default="mean",
        holds=one_of("mean", "sum", "none"),
        fits="'mean', 'sum' or 'none'",
        trials=("sum", "none"),
    ),
)

CONTRACT = Contract(
    name="cross_entropy",
    summary="-log softmax(logits)[target], label smoothing, z-loss, ignored targets",
    arguments=(
        Argument(name="logits", dims="... V"),
        indices("targets", "...", classes),
    ),
    options=LOSS_OPTIONS,
    returns="() or, with reduction='none', (...); float32",
    results={"loss": ""},
    wide=True,
    positive="V",
    explain_error=lambda logits, targets, ignore_index, *_: check_classes(
        "cross_entropy", targets, logits.shape[-1], ignore_index
    ),
    forward=streaming("... V", tensors=1, flops=4, row_bytes=12),
    backward=streaming("... V", tensors=2, flops=4, row_bytes=12),
    example={"...": 128, "V": 256},
    reference=cross_entropy,
    ladders=(
        Ladder({"V": 1024}, ("...",)),
        Ladder({"V": 16384}, ("...",)),
    ),
    model=Model(free=("...", "V")),
)

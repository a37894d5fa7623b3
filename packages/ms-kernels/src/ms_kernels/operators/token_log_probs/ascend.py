"""Log-probabilities of tokens with the fused operators of `linear_cross_entropy.ascend`."""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import HALVES, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.linear_cross_entropy.ascend import (
    MERIT,
    gradients,
    large_enough,
    row_losses,
    valid_classes,
)
from ms_kernels.operators.token_log_probs.contract import CONTRACT


def _forward(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ignored = tokens == options[1]
    classes, out_of_range = valid_classes(tokens, ignored, weight)
    losses, top, total = (
        tensor.view(tokens.shape) for tensor in row_losses(hidden, weight, classes)
    )
    log_probs = (-losses).masked_fill_(out_of_range, torch.nan).masked_fill_(ignored, 0)
    # Zeros in place of the entropies, which `_refuses` declines.
    return log_probs, torch.zeros_like(losses), top, total


def _backward(
    grad: Tensor,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    top: Tensor,
    total: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    ignored = tokens == options[1]
    row_grads = (-grad).masked_fill(ignored, 0).reshape(-1)  # the loss is -log p
    return gradients(
        row_grads, hidden, weight, valid_classes(tokens, ignored, weight)[0], top, total
    )


_log_probs = opaque(
    CONTRACT,
    "ascend",
    forward=_forward,
    intermediates={"top": "...", "total": "..."},
    backward=_backward,
    saves=("hidden", "weight", "tokens", "top", "total"),
)


def token_log_probs(hidden: Tensor, weight: Tensor, tokens: Tensor, *options: Any) -> Tensor:
    """Return log p of the tokens; saves two float32 values per row."""
    result: Tensor = _log_probs(hidden, weight, tokens, *options)[0]
    return result


def _refuses(call: Call) -> str | None:
    """Decline a temperature other than 1, entropies, and unsupported sizes."""
    if call.options[0] != 1:
        return f"supports only temperature 1, not {call.options[0]}"
    if call.options[2]:
        return "does not compute entropies"
    return large_enough(call)


IMPLEMENTATION = on_npu(CONTRACT, token_log_probs, MERIT, refuses=_refuses, dtypes=HALVES)

"""Log-probabilities of tokens by the fused operators of `linear_cross_entropy.ascend`."""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import HALVES, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.linear_cross_entropy.ascend import (
    MERIT,
    chosen_classes,
    gradients,
    large_enough,
    row_losses,
)
from ms_kernels.operators.token_log_probs.contract import CONTRACT


def _forward(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ignored = tokens == options[1]
    chosen, foreign = chosen_classes(tokens, ignored, weight)
    losses, top, total = (each.view(tokens.shape) for each in row_losses(hidden, weight, chosen))
    found = (-losses).masked_fill_(foreign, torch.nan).masked_fill_(ignored, 0)
    return found, torch.zeros_like(losses), top, total


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
    slopes = (-grad).masked_fill(ignored, 0).reshape(-1)
    return gradients(slopes, hidden, weight, chosen_classes(tokens, ignored, weight)[0], top, total)


_log_probs = opaque(
    CONTRACT,
    "ascend",
    forward=_forward,
    intermediates={"top": "...", "total": "..."},
    backward=_backward,
    saves=("hidden", "weight", "tokens", "top", "total"),
)


def token_log_probs(hidden: Tensor, weight: Tensor, tokens: Tensor, *options: Any) -> Tensor:
    """Return log p of the tokens; keep two float32 a row."""
    result: Tensor = _log_probs(hidden, weight, tokens, *options)[0]
    return result


def _refuses(call: Call) -> str | None:
    """Decline a temperature, entropies, and sizes that the kernels do not take."""
    if call.options[0] != 1:
        return f"has no temperature but 1, and here is {call.options[0]}"
    if call.options[2]:
        return "makes no entropies"
    return large_enough(call)


IMPLEMENTATION = on_npu(CONTRACT, token_log_probs, MERIT, refuses=_refuses, dtypes=HALVES)

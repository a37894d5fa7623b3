"""Log-probabilities of given tokens from half-precision products and fused row kernels.

The logits are computed chunk by chunk, and again in the backward pass; three values per row are
saved in between.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import row_blocks
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.backends.triton.rows import as_rows, empty
from ms_kernels.core.entries import Entry
from ms_kernels.core.launches import key_of
from ms_kernels.core.plan import needs_grad
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.cross_entropy.triton import class_kernels, loss_entry
from ms_kernels.operators.linear_cross_entropy.triton import MERIT
from ms_kernels.operators.linear_cross_entropy.triton_logits import (
    TritonGradientSums,
    chunks,
    normalize_row_grads,
    scale_kernel,
)
from ms_kernels.operators.token_log_probs.contract import CONTRACT

FORWARD, BACKWARD, SCALE = TUNED = (
    *class_kernels("token_log_probs", "log_probs_forward log_probs_backward", hidden=True),
    scale_kernel("token_log_probs"),
)
KERNELS = f"{__package__}.kernels"


def token_log_probs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``log softmax(hidden @ weight.T / temperature)[token]``, and entropies if asked."""
    results: tuple[Tensor, Tensor] = _token_log_probs(hidden, weight, tokens, *options)
    _, _, entropy = options
    return results if entropy else results[0]


def _forward(
    hidden: Tensor, weight: Tensor, tokens: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    temperature, ignore_index, _ = options
    rows, token_index = as_rows(hidden), tokens.reshape(-1).contiguous()
    log_probs, entropy, lse = (empty(tokens, torch.float32) for _ in range(3))
    for part, logits, _ in chunks(rows, weight):
        launch(
            f"{KERNELS}.log_probs_forward",
            len(logits),
            logits,
            *(
                logits,
                token_index[part],
                *(out.view(-1)[part] for out in (log_probs, entropy, lse)),
            ),
            *(logits.shape[1], logits.stride(0), ignore_index, 1 / temperature),
            **row_blocks(FORWARD, key_of(hidden), len(weight)),
        )
    return log_probs, entropy, lse


def _backward(
    grad: Tensor,
    grad_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    lse: Tensor,
    entropies: Tensor,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    temperature, ignore_index, _ = options
    rows, token_index = as_rows(hidden), tokens.reshape(-1).contiguous()
    needs_hidden, needs_weight = needs_grad(grad_mask, 0), needs_grad(grad_mask, 1)
    sums = TritonGradientSums(rows, weight, of_hidden=needs_hidden, of_weight=needs_weight)
    # One scale for both, as their gradients are added in the same buffer.
    peak, (grads, entropy_grads) = normalize_row_grads(
        hidden.dtype, grad.view(-1), grad_entropy.view(-1)
    )
    constants = row_blocks(BACKWARD, key_of(hidden), len(weight))
    lse, entropy = lse.view(-1), entropies.view(-1)
    for part, logits, gradient in chunks(rows, weight, gradients=True):
        count, classes = logits.shape
        launch(
            f"{KERNELS}.log_probs_backward",
            count * blocks(classes, constants["BLOCK"]),
            logits,
            *(
                logits,
                token_index[part],
                lse[part],
                entropy[part],
                grads[part],
                entropy_grads[part],
            ),
            *(gradient, classes, logits.stride(0), gradient.stride(0)),
            *(ignore_index, 1 / temperature),
            **constants,
        )
        sums.add(gradient, rows, weight, part)
    return sums.scaled(SCALE, peak, hidden, weight)


_token_log_probs = opaque(
    CONTRACT,
    "triton",
    forward=_forward,
    intermediates={"lse": "..."},
    backward=_backward,
    saves=("hidden", "weight", "tokens", "lse", "entropies"),
)


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    floats = "LOGITS LOG_PROBS ENTROPY LSE DLOGP DENTROPY beta"
    for kernel in (FORWARD, BACKWARD):
        yield loss_entry(kernel, KERNELS, chip, dtype, flags={}, fp32=floats, i64="TOKENS")


IMPLEMENTATION = on_gpu(CONTRACT, MERIT, tuned=TUNED, entries=entries, run=token_log_probs)

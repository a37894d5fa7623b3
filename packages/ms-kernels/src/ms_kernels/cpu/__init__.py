"""torch's own operators on the CPU, arranged where that is faster or leaner than the reference."""

from collections.abc import Callable
from typing import Any

import torch

from ms_kernels.contract import Call
from ms_kernels.cpu import (
    adamw_step,
    add_rms_norm,
    attention,
    cross_entropy,
    decode_attention,
    geglu,
    grouped_matmul,
    layer_norm,
    linear_cross_entropy,
    quantized_linear,
    rms_norm,
    rotary,
    swiglu,
    token_log_probs,
)
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS"]

CPU = frozenset({"cpu"})

SMALL = 2**16
"""Elements below which Python's share of the time outweighs what is saved, where no table says."""


def _traced(call: Call) -> str | None:
    """Decline where the reference is faster: under inductor."""
    return "torch.compile fuses the reference by itself" if call.compiling else None


def _offer(
    operator: str,
    run: Callable[..., Any],
    merit: str,
    *,
    refuses: Callable[[Call], str | None] = _traced,
    dtypes: tuple[torch.dtype, ...] | None = None,
    pays_from: int = SMALL,
) -> Implementation:
    return Implementation(
        operator=operator,
        backend="cpu",
        run=run,
        devices=CPU,
        dtypes=dtypes,
        refuses=refuses,
        pays_from=pays_from,
        merit=merit,
    )


IMPLEMENTATIONS = (
    _offer(
        "rms_norm",
        rms_norm.rms_norm,
        "blocks of rows in the cache; saves x and one number a row",
    ),
    _offer(
        "add_rms_norm",
        add_rms_norm.add_rms_norm,
        "blocks of rows in the cache; saves the sum and one number a row",
    ),
    _offer(
        "layer_norm",
        layer_norm.layer_norm,
        "torch's fused kernel, one pass over memory",
    ),
    _offer(
        "rotary",
        rotary.rotary,
        "writes into the result, no temporaries; saves only the angles",
        dtypes=(torch.float32, torch.float64),
    ),
    _offer(
        "swiglu",
        swiglu.swiglu,
        "blocks of rows in the cache; saves only gate and up",
    ),
    _offer(
        "geglu",
        geglu.geglu,
        "blocks of rows in the cache; saves only gate and up",
    ),
    _offer(
        "attention",
        attention.attention,
        "torch's fused kernel, which never holds the scores",
        refuses=attention.refuses,
    ),
    _offer(
        "decode_attention",
        decode_attention.decode_attention,
        "reads only the pages in use; torch's fused kernel",
        refuses=decode_attention.refuses,
    ),
    _offer(
        "cross_entropy",
        cross_entropy.cross_entropy,
        "blocks of rows in the cache; saves one number a row besides the logits",
    ),
    _offer(
        "linear_cross_entropy",
        linear_cross_entropy.linear_cross_entropy,
        "does no work for ignored rows",
        pays_from=0,
    ),
    _offer(
        "token_log_probs",
        token_log_probs.token_log_probs,
        "does no work for ignored rows",
        pays_from=0,
    ),
    _offer(
        "grouped_matmul",
        grouped_matmul.grouped_matmul,
        "writes into the result, skips experts without rows, one operator to torch.compile",
        refuses=lambda call: None,
        pays_from=0,
    ),
    _offer(
        "quantized_linear",
        quantized_linear.quantized_linear,
        "widens a few rows of the weight at a time, and saves it packed",
    ),
    _offer(
        "adamw_step",
        adamw_step.adamw_step,
        "torch's fused kernel, one pass over memory",
        refuses=adamw_step.refuses,
    ),
)

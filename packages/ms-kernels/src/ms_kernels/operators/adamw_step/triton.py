"""AdamW in one pass: every tensor is read once and written at most once."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.contracts.call import Call, describe
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, key_of
from ms_kernels.operators.adamw_step.contract import CONTRACT

(STEP,) = TUNED = tuned_kernels(
    "adamw_step",
    "adamw_step",
    tried_at=({"...": 2**26},),
    candidates=grid(BLOCK=(1024, 2048, 4096), num_warps=(4, 8)),
    defaults=((ANY_SIZE, {"BLOCK": 1024, "num_warps": 4}),),
)
KERNEL = f"{__package__}.kernels.adamw_step"


def _step(weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *options: Any) -> None:
    step, learning_rate, betas, eps, weight_decay = options
    constants = STEP.values(key_of(weights))
    launch(
        KERNEL,
        blocks(weights.numel(), constants["BLOCK"]),
        weights,
        *(weights, gradient, mean, square, weights.numel()),
        # Decoupled weight decay, then the bias corrections of both moments.
        *(1 - betas[0], 1 - betas[1], 1 - learning_rate * weight_decay),
        *(learning_rate / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5, float(eps)),
        **constants,
    )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    yield entry(
        "adamw_step",
        KERNEL,
        dtype,
        "",
        STEP.values(TableKey(chip, DTYPES[dtype])),
        "cdiv(count, BLOCK)",
        fp32="MEAN SQUARE mean_weight square_weight decay_factor step_size root_scale eps",
    )


def _refuses(call: Call) -> str | None:
    """Decline non-contiguous tensors and float64 moments."""
    moments = call.present[2].dtype
    if moments != torch.float32:
        return f"needs moments in float32, not {describe(moments)}"
    for argument, meta in zip(CONTRACT.arguments, call.present, strict=True):
        if not meta.contiguous:
            return f"writes contiguous tensors in place; {argument.name} is not contiguous"
    return None


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "one pass over memory, in place",
    tuned=TUNED,
    entries=entries,
    refuses=_refuses,
    forward=_step,
)

"""LayerNorm in one pass over memory each way; saves x and two float32 numbers a row."""

import torch
from torch import Tensor

from ms_kernels.library import is_wanted, opaque, unwanted
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.rows import as_rows, empty

__all__ = ["layer_norm"]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    result, mean, scale = _fake(x, weight, bias, eps)
    weight = weight.contiguous()
    where = "layer_norm", "layer_norm_forward", configuration.place_of(x)
    constants = configuration.whole_rows(*where, rows.shape[1])
    launch(
        "layer_norm.layer_norm_forward",
        blocks(len(rows), constants["ROWS"]),
        x,
        *(rows, weight, weight if bias is None else bias.contiguous(), result, mean, scale),
        *(*rows.shape, rows.stride(0), eps),
        BIAS=bias is not None,
        **constants,
    )
    return result, mean, scale


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return empty(x), mean, torch.empty_like(mean)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    wanted: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, pulls = as_rows(x), as_rows(grad)
    where = "layer_norm", "layer_norm_backward", configuration.place_of(x)
    constants = configuration.whole_rows(*where, rows.shape[1])
    each, programs = configuration.shares(*where, *rows.shape)
    grad_x = empty(x)
    parts = x.new_empty((2, programs, rows.shape[1]), dtype=torch.float32)
    launch(
        "layer_norm.layer_norm_backward",
        programs,
        x,
        *(pulls, rows, weight.contiguous(), mean, scale, grad_x, parts[0], parts[1]),
        *(*rows.shape, pulls.stride(0), rows.stride(0), each),
        **constants,
    )
    return (
        grad_x if is_wanted(wanted, 0) else unwanted(x),
        parts[0].sum(0).to(weight.dtype) if is_wanted(wanted, 1) else unwanted(weight),
        parts[1].sum(0).to(weight.dtype) if is_wanted(wanted, 2) else unwanted(weight),
    )


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    scale: Tensor,
    wanted: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        empty(x) if is_wanted(wanted, 0) else unwanted(x),
        empty(weight) if is_wanted(wanted, 1) else unwanted(weight),
        empty(weight) if is_wanted(wanted, 2) else unwanted(weight),
    )


layer_norm = opaque(
    CONTRACTS["layer_norm"],
    "triton",
    forward=_forward,
    fake=_fake,
    kept={"mean": "...", "scale": "..."},
    backward=_backward,
    fake_backward=_fake_backward,
    saves=("x", "weight", "mean", "scale"),
)

"""Linear layer with a weight quantized to 4 or 8 bits; see `ms_kernels.packed_weights`."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, Option, Work
from ms_kernels.contracts.call import FLOATING, Dims, accumulator
from ms_kernels.contracts.contract import Contract, Variant
from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.contracts.values import is_integer
from ms_kernels.packed_weights import dequantize


def quantized_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bits: int = 4,
    group_size: int = 32,
) -> Tensor:
    """Return ``x @ weight.T`` with the dequantized weight, rounded once."""
    if transforms_active():
        wide = accumulator(x.dtype)
        weight = dequantize_weight(wide, packed, scales, zeros, bits, group_size)
        return (x.to(wide) @ weight.T).to(x.dtype)
    result: Tensor = _Packed.apply(  # type: ignore[no-untyped-call]
        x, packed, scales, zeros, bits, group_size
    )
    return result


class _Packed(torch.autograd.Function):
    """Product that dequantizes the weight again in backward: saving it would cost the full size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, *form: int
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, zeros)
        ctx.form = form
        wide = accumulator(x.dtype)
        weight = dequantize_weight(wide, packed, scales, zeros, *form)
        result = x.to(wide) @ weight.T
        # torch 2.11's compiler drops the gradient of an output that is a no-op cast.
        return result if wide == x.dtype else result.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wide = accumulator(grad.dtype)
        weight = dequantize_weight(wide, *ctx.saved_tensors, *ctx.form)
        return (grad.to(wide) @ weight).to(grad.dtype), None, None, None, None, None


def dequantize_weight(
    wide: torch.dtype, packed: Tensor, scales: Tensor, zeros: Tensor | None, *form: int
) -> Tensor:
    """Return the dequantized weight in dtype `wide`, computed in at least the precision of scales.

    `form` is (bits, group_size).
    """
    bits, group_size = form
    scales = scales.to(torch.promote_types(scales.dtype, wide))
    return dequantize(packed, scales, zeros, bits=bits, group_size=group_size).to(wide)


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    bits, group_size = options["bits"], options["group_size"]
    if dims["P"] * 8 != dims["K"] * bits:
        fits = f"of a second size of {dims['K'] * bits / 8:g}, {bits} bits for each of x's features"
        yield "packed", fits
    if dims["G"] * group_size != dims["K"]:
        fits = f"of a second size of {dims['K'] / group_size:g}, x's {dims['K']} / group_size"
        yield "scales", fits


def _codes(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return torch.randint(256, shape, generator=generator).to(torch.uint8)


def _scales(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)) * 2**-6


def _zeros(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return torch.randint(16, shape, generator=generator).to(torch.float64)


def _forward(dims: Dims, itemsize: int) -> Work:
    # Packed codes are uint8 for every dtype of x.
    rows, weights = dims["..."], dims["N"] * (dims["P"] + dims["G"] * itemsize)
    flops = 2 * rows * dims["K"] * dims["N"]
    return Work(rows * (dims["K"] + dims["N"]) * itemsize + weights, flops)


CONTRACT = Contract(
    name="quantized_linear",
    summary="x @ weight.T, the weight packed in 4 or 8 bits with one scale per group",
    arguments=(
        Argument(name="x", dims="... K"),
        Argument(
            name="packed", dims="N P", dtypes=(torch.uint8,), differentiable=False, draw=_codes
        ),
        Argument(name="scales", dims="N G", dtypes=FLOATING, differentiable=False, draw=_scales),
        Argument(
            name="zeros",
            dims="N G",
            dtypes=FLOATING,
            like="scales",
            optional=True,
            differentiable=False,
            draw=_zeros,
        ),
    ),
    options=(
        Option(
            name="bits",
            default=4,
            holds=lambda value: is_integer(value) and value in (4, 8),
            fits="4 or 8",
        ),
        Option(
            name="group_size",
            default=32,
            holds=lambda value: is_integer(value, 1, 2**31 - 1),
            fits="an integer of at least 1",
        ),
    ),
    returns="(... N), dtype of x",
    results={"result": "... N"},
    splits=("...", "N"),
    positive="K N P G",
    rules=_rules,
    forward=_forward,
    backward=_forward,
    example={"...": 24, "K": 64, "N": 40, "P": 32, "G": 2},
    variants=(
        Variant({"bits": 8}, {"P": 64}),
        Variant({"bits": 8, "group_size": 64}, {"P": 64, "G": 1}),
        Variant({"group_size": 16}, {"G": 4}),
    ),
    reference=quantized_linear,
    ladders=(
        Ladder({"K": 512, "P": 256, "G": 16, "N": 512}, ("...",)),
        Ladder({"K": 2048, "P": 1024, "G": 64, "N": 2048}, ("...",)),
    ),
    model=Model(free=("...", "N")),
)

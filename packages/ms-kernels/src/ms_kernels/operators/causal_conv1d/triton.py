"""Causal convolution in one pass over memory; gradients without atomic additions."""

from collections.abc import Iterator
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import empty, with_unit_stride
from ms_kernels.contracts.call import Call
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, TunedKernel, key_of
from ms_kernels.core.plan import absent_grad, needs_grad
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.causal_conv1d.contract import CONTRACT, last_inputs

MAX_WIDTH = 16
"""Maximum weights per channel: the kernels unroll the loop over them."""

MAX_STRIDE = 2**23
"""Maximum stride between positions, in elements."""

(FORWARD,) = tuned_kernels(
    "causal_conv1d",
    "conv_forward",
    sizes="C",
    tried_at=({"B": 4, "S": 4096, "C": 8192, "K": 4},),
    candidates=grid(BS=(16, 32, 64), BC=(64, 128, 256), num_warps=(4, 8)),
    defaults=((ANY_SIZE, {"BS": 32, "BC": 128, "num_warps": 4}),),
)

# Backward kernels keep inputs, sums and masks in registers: with documents, 32 elements per thread
# (BC=128) spill on some chips, 16 on none.
SUM_GRADIENT, BACKWARD = (
    evolve(FORWARD, name=name, defaults=((ANY_SIZE, {"BS": 32, "BC": 64, "num_warps": 4}),))
    for name in ("conv_silu_backward", "conv_backward")
)

TUNED = FORWARD, SUM_GRADIENT, BACKWARD
KERNELS = f"{__package__}.kernels"


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    *options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the depthwise convolution with optional SiLU; with `final_state` the last inputs."""
    result: Tensor = _convolution(x, weight, bias, documents, state, *options)
    return (result, last_inputs(x, state, documents, weight.shape[1])) if options[-1] else result


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    *options: Any,
) -> Tensor:
    x, result = with_unit_stride(x), empty(x)
    constants = _constants(FORWARD, key_of(x), x.shape[2])
    launch(
        f"{KERNELS}.conv_forward",
        _tiles(x, x.shape[1], constants),
        x,
        *(x, *_tables(x, weight, bias, documents, state), result, *_sizes(x)),
        **_flags(weight, bias, documents, state, silu=options[0]),
        **constants,
    )
    return result


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    grad_mask: int,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, grad_x, taps = with_unit_stride(x), empty(x), weight.shape[1]
    tables = weights, _, document_ids, states = _tables(x, weight, bias, documents, state)
    # Gradient of the sums before SiLU, in float32; `grad` itself if it is that already.
    grad_sums = grad
    if options[0] or grad.dtype != torch.float32:
        grad_sums = empty(x, torch.float32)
        constants = _constants(SUM_GRADIENT, key_of(x), x.shape[2])
        launch(
            f"{KERNELS}.conv_silu_backward",
            _tiles(x, x.shape[1], constants),
            x,
            *(x, *tables, grad, grad_sums, *_sizes(x)),
            **_flags(weight, bias, documents, state, silu=options[0]),
            **constants,
        )
    grad_state = absent_grad(x) if state is None else empty(state)
    # Positions start at -K: the inputs in `state` get gradients too.
    constants = _constants(BACKWARD, key_of(x), x.shape[2])
    rows = len(x) * blocks(x.shape[1] + taps, constants["BS"])
    # (tiles of rows, K + 1, C): K weights and the bias, summed below in a fixed order.
    partial_sums = x.new_empty((rows, taps + 1, x.shape[2]), dtype=torch.float32)
    flags = _flags(weight, bias, documents, state, silu=False)
    launch(
        f"{KERNELS}.conv_backward",
        _tiles(x, x.shape[1] + taps, constants),
        x,
        *(
            x,
            weights,
            document_ids,
            states,
            grad_sums,
            grad_x,
            grad_state,
            partial_sums,
            *_sizes(x),
        ),
        **{name: flags[name] for name in ("K", "CUT", "HAS_STATE")},
        **constants,
    )
    sums = partial_sums.sum(0)
    return (
        grad_x if needs_grad(grad_mask, 0) else absent_grad(x),
        sums[:-1].T.to(weight.dtype).contiguous()
        if needs_grad(grad_mask, 1)
        else absent_grad(weight),
        sums[-1].to(x.dtype) if needs_grad(grad_mask, 2) else x.new_empty(0),
        grad_state if needs_grad(grad_mask, 3) else absent_grad(x),
    )


def _tables(x: Tensor, weight: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Return contiguous weight, bias, documents and state; x is the placeholder for None."""
    return (
        weight.contiguous(),
        *(x if tensor is None else tensor.contiguous() for tensor in others),
    )


def _sizes(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[1:], *x.stride()[:2])


def _flags(
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    *,
    silu: bool,
) -> dict[str, Any]:
    return {
        "K": weight.shape[1],
        "SILU": silu,
        "BIASED": bias is not None,
        "CUT": documents is not None,
        "HAS_STATE": state is not None,
    }


def _tiles(x: Tensor, places: int, constants: dict[str, int]) -> int:
    return len(x) * blocks(places, constants["BS"]) * blocks(x.shape[2], constants["BC"])


def _constants(kernel: TunedKernel, key: TableKey, width: int) -> dict[str, int]:
    values = kernel.values(key, width)
    return {**values, "BC": min(power_of_two(width), values["BC"])}


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library: 4 taps, with and without documents."""
    tiles = "batch * cdiv({}, BS) * cdiv(width, BC)"
    for kernel, extent in zip(TUNED, ("positions", "positions", "positions + K"), strict=True):
        for detail, cut in (("4", False), ("4_documents", True)):
            flags = {"K": 4, "CUT": cut, "HAS_STATE": False}
            if kernel is not BACKWARD:
                flags |= {"SILU": True, "BIASED": cut}
            yield entry(
                "causal_conv1d",
                f"{KERNELS}.{kernel.name}",
                dtype,
                detail,
                {**_constants(kernel, TableKey(chip, DTYPES[dtype]), 4096), **flags},
                tiles.format(extent),
                fp32="DSUM DW",
                i32="DOCUMENTS",
                extra=("batch",),
            )


def _refuses(call: Call) -> str | None:
    """Decline too many weights per channel, and strides too large for 32-bit offsets."""
    x, weight = call.present[:2]
    if weight.shape[1] > MAX_WIDTH:
        return f"supports up to {MAX_WIDTH} weights per channel, not {weight.shape[1]}"
    if x.strides[1] > MAX_STRIDE:
        return f"supports strides of positions up to {MAX_STRIDE}, not {x.strides[1]}"
    return None


_convolution = opaque(
    evolve(CONTRACT, results={"result": "B S C"}, positive="S C K"),
    "triton",
    forward=_forward,
    backward=_backward,
    saves=("x", "weight", "bias", "documents", "state"),
)

IMPLEMENTATION = on_gpu(
    CONTRACT,
    "one pass over memory, including SiLU; saves only its inputs",
    tuned=TUNED,
    entries=entries,
    refuses=_refuses,
    run=causal_conv1d,
)

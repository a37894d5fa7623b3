"""Gated activations in one pass over memory each way; saves only their inputs."""

from collections.abc import Iterator

from torch import Tensor

from ms_kernels.backends.triton.configuration import elements, grid, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch
from ms_kernels.backends.triton.rows import as_rows, empty, needed_grads
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, TunedKernel, key_of
from ms_kernels.operators.swiglu.contract import CONTRACT

KERNELS = f"{__package__}.kernels"
MERIT = "one pass over memory each way; saves only gate and up"


def gate_kernels(operator: str) -> tuple[TunedKernel, ...]:
    """Return the forward and backward kernels of a gated activation."""
    return tuned_kernels(
        operator,
        "gated_forward gated_backward",
        sizes="I",
        tried_at=({"...": 8192, "I": 14336},),
        candidates=grid(ELEMENTS=(1024, 2048, 4096), num_warps=(4, 8)),
        defaults=((ANY_SIZE, {"ELEMENTS": 2048, "num_warps": 4}),),
    )


FORWARD, BACKWARD = TUNED = gate_kernels("swiglu")


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    return apply(FORWARD, gate, up, "silu")


def _backward(grad: Tensor, gate: Tensor, up: Tensor, grad_mask: int) -> tuple[Tensor, Tensor]:
    return differentiate(BACKWARD, grad, gate, up, grad_mask, "silu")


def apply(kernel: TunedKernel, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) · up``; `activation` is the kernel's name for the function."""
    gates, ups, result = as_rows(gate), as_rows(up), empty(gate)
    constants, tiles = _tiling(kernel, gates)
    launch(
        f"{KERNELS}.gated_forward",
        tiles,
        gate,
        *(gates, ups, result, *gates.shape, gates.stride(0), ups.stride(0)),
        ACTIVATION=activation,
        **constants,
    )
    return result


def differentiate(
    kernel: TunedKernel, grad: Tensor, gate: Tensor, up: Tensor, grad_mask: int, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    gates, ups, grad_rows = as_rows(gate), as_rows(up), as_rows(grad)
    grad_gate, grad_up = empty(gate), empty(up)
    constants, tiles = _tiling(kernel, gates)
    launch(
        f"{KERNELS}.gated_backward",
        tiles,
        gate,
        *(grad_rows, gates, ups, grad_gate, grad_up, *gates.shape),
        *(grad_rows.stride(0), gates.stride(0), ups.stride(0)),
        ACTIVATION=activation,
        **constants,
    )
    return needed_grads(grad_mask, (grad_gate, grad_up))


def _tiling(kernel: TunedKernel, gates: Tensor) -> tuple[dict[str, int], int]:
    """Return the constants and the number of tiles of a launch."""
    rows, width = gates.shape
    constants = elements(kernel, key_of(gates), width)
    return constants, blocks(rows, constants["ROWS"]) * blocks(width, constants["BLOCK"])


def gate_entries(
    tuned: tuple[TunedKernel, ...], activation: str, chip: str, dtype: str
) -> Iterator[Entry]:
    """Yield the library entries of a gated activation, for rows of any width."""
    for kernel in tuned:
        constants = elements(kernel, TableKey(chip, DTYPES[dtype]), 4096)
        yield entry(
            kernel.operator,
            f"{KERNELS}.{kernel.name}",
            dtype,
            activation,
            {**constants, "ACTIVATION": activation},
            "cdiv(rows, ROWS) * cdiv(width, BLOCK)",
        )


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    yield from gate_entries(TUNED, "silu", chip, dtype)


IMPLEMENTATION = on_gpu(
    CONTRACT,
    MERIT,
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    backward=_backward,
    saves=("gate", "up"),
)

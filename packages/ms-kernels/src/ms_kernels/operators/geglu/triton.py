"""GEGLU in Triton, with the kernels of `swiglu.kernels`: one pass over memory each way."""

from collections.abc import Iterator

from torch import Tensor

from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.core.entries import Entry
from ms_kernels.operators.geglu.contract import CONTRACT
from ms_kernels.operators.swiglu.triton import (
    MERIT,
    apply,
    differentiate,
    gate_entries,
    gate_kernels,
)

ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}

FORWARD, BACKWARD = TUNED = gate_kernels("geglu")


def _forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return apply(FORWARD, gate, up, ACTIVATIONS[approximate])


def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_mask: int, approximate: str
) -> tuple[Tensor, Tensor]:
    return differentiate(BACKWARD, grad, gate, up, grad_mask, ACTIVATIONS[approximate])


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library."""
    for activation in ACTIVATIONS.values():
        yield from gate_entries(TUNED, activation, chip, dtype)


IMPLEMENTATION = on_gpu(
    CONTRACT,
    MERIT,
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    backward=_backward,
    saves=("gate", "up"),
)

"""SwiGLU and GEGLU in one pass over memory each way; they save nothing but their inputs."""

from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.rows import as_rows, empty, wanted_of

__all__ = ["geglu", "swiglu"]

GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    return _apply(gate, up, "silu")


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return empty(gate)


def _backward(grad: Tensor, gate: Tensor, up: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    return _differentiate(grad, gate, up, wanted, "silu")


swiglu = opaque(
    CONTRACTS["swiglu"],
    "triton",
    forward=_forward,
    fake=_fake,
    backward=_backward,
    saves=("gate", "up"),
)


def _gelu_forward(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return _apply(gate, up, GELU[approximate])


def _gelu_fake(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return empty(gate)


def _gelu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, wanted: int, approximate: str
) -> tuple[Tensor, Tensor]:
    return _differentiate(grad, gate, up, wanted, GELU[approximate])


geglu = opaque(
    CONTRACTS["geglu"],
    "triton",
    forward=_gelu_forward,
    fake=_gelu_fake,
    backward=_gelu_backward,
    saves=("gate", "up"),
)


def _apply(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    gates, ups, result = as_rows(gate), as_rows(up), empty(gate)
    constants, tiles = _tiling("gated_forward", gates, activation)
    launch(
        "gated.gated_forward",
        tiles,
        gate,
        *(gates, ups, result, *gates.shape, gates.stride(0), ups.stride(0)),
        ACTIVATION=activation,
        **constants,
    )
    return result


def _differentiate(
    grad: Tensor, gate: Tensor, up: Tensor, wanted: int, activation: str
) -> tuple[Tensor, Tensor]:
    gates, ups, pulls = as_rows(gate), as_rows(up), as_rows(grad)
    grad_gate, grad_up = empty(gate), empty(up)
    constants, tiles = _tiling("gated_backward", gates, activation)
    launch(
        "gated.gated_backward",
        tiles,
        gate,
        *(pulls, gates, ups, grad_gate, grad_up, *gates.shape),
        *(pulls.stride(0), gates.stride(0), ups.stride(0)),
        ACTIVATION=activation,
        **constants,
    )
    grads = wanted_of(wanted, (grad_gate, grad_up))
    return grads[0], grads[1]


def _tiling(kernel: str, gates: Tensor, activation: str) -> tuple[dict[str, int], int]:
    """Return the constants of a launch and its tiles."""
    operator = "swiglu" if activation == "silu" else "geglu"
    rows, width = gates.shape
    constants = configuration.elements(operator, kernel, configuration.place_of(gates), width)
    return constants, blocks(rows, constants["ROWS"]) * blocks(width, constants["BLOCK"])

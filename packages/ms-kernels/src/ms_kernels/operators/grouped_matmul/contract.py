"""One matrix product per group of consecutive rows: the experts of a mixture-of-experts layer."""

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Work, indices
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_range, readable
from ms_kernels.contracts.transforms import transforms_active
from ms_kernels.errors import ArgumentError


def grouped_matmul(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return each row times its expert's matrix, computed in float32.

    Reading the counts synchronizes an accelerator. Under torch.compile, which cannot read them,
    every expert multiplies all rows, with the rows of other experts set to 0.
    """
    wide = accumulator(x.dtype)
    if torch.compiler.is_compiling() or not _readable(counts):
        return _masked(x.to(wide), weights.to(wide), counts).to(x.dtype)
    parts = torch.split(x.to(wide), counts.tolist())
    results = [part @ weight.to(wide) for part, weight in zip(parts, weights, strict=True)]
    return torch.cat(results).to(x.dtype)


def _readable(counts: Tensor) -> bool:
    """Return whether the values can be read: fake, meta and vmapped tensors have none."""
    return type(counts) is Tensor and counts.device.type != "meta" and not transforms_active()


def _masked(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    ends = counts.cumsum(0)
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    result = x.new_zeros(x.shape[0], weights.shape[-1])
    for expert, weight in enumerate(weights):
        mask = (row < ends[expert]) & (row >= ends[expert] - counts[expert])
        result = result + (x * mask) @ weight
    return result


def _counts(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw a random expert per row and count them; experts 0, 3, 6, ... get no rows."""
    used_experts = [expert for expert in range(shape[0]) if expert % 3] or [0]
    row_experts = torch.tensor(used_experts)[
        torch.randint(len(used_experts), (dims["T"],), generator=generator)
    ]
    return torch.bincount(row_experts, minlength=shape[0])


def _forward(dims: Dims, itemsize: int) -> Work:
    rows, experts, width, out = dims["T"], dims["E"], dims["K"], dims["N"]
    elements = rows * (width + out) + experts * width * out
    return Work(elements * itemsize, 2 * rows * width * out)


def _backward(dims: Dims, itemsize: int) -> Work:
    rows, experts, width, out = dims["T"], dims["E"], dims["K"], dims["N"]
    elements = rows * (2 * width + out) + 2 * experts * width * out
    return Work(elements * itemsize, 4 * rows * width * out)


def _check_counts(x: Tensor, weights: Tensor, counts: Tensor) -> None:
    """Reject counts below 0, and counts whose sum is not the number of rows."""
    if not readable(counts):
        return
    rows = x.shape[0]
    check_range("grouped_matmul", "counts", counts, rows + 1)
    if int(counts.sum()) != rows:
        fits = f"{rows} in total, the number of rows of x"
        raise ArgumentError("grouped_matmul", "counts", f"{int(counts.sum())} in total", fits)


CONTRACT = Contract(
    name="grouped_matmul",
    summary="each expert's counts[e] consecutive rows of x, times weights[e]",
    arguments=(
        Argument(name="x", dims="T K"),
        Argument(name="weights", dims="E K N", like="x"),
        indices("counts", "E", _counts),
    ),
    returns="(T N), dtype of x",
    results={"result": "T N"},
    splits=("N",),
    positive="E K N",
    explain_error=_check_counts,
    forward=_forward,
    backward=_backward,
    example={"T": 96, "E": 4, "K": 32, "N": 48},
    reference=grouped_matmul,
    ladders=(Ladder({"E": 8, "K": 128, "N": 256}, ("T",)),),
)

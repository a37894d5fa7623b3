"""Rotary embedding of queries and keys in one launch each way; saves only the angles."""

from collections.abc import Iterator
from itertools import product

from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.implementation import on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import empty, needed_grads, with_unit_stride
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, key_of
from ms_kernels.operators.rotary.contract import CONTRACT

(ROTATE,) = TUNED = tuned_kernels(
    "rotary",
    "rotate_heads",
    sizes="R/2",
    tried_at=({"B": 4, "S": 4096, "Hq": 32, "Hk": 8, "D": 128, "R/2": 64},),
    candidates=grid(ELEMENTS=(512, 1024, 2048), num_warps=(2, 4, 8)),
    defaults=((ANY_SIZE, {"ELEMENTS": 1024, "num_warps": 4}),),
)
KERNELS = f"{__package__}.kernels"


def _forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(q, k, cos, sin, interleaved, inverse=False)


def _backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, grad_mask: int, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return needed_grads(grad_mask, _rotate(grad_q, grad_k, cos, sin, interleaved, inverse=True))


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, inverse: bool
) -> tuple[Tensor, Tensor]:
    """Rotate q (B, S, Hq, D) and k (B, S, Hk, D); the inverse rotation if `inverse`."""
    q, k, cos, sin = with_unit_stride(q), with_unit_stride(k), cos.contiguous(), sin.contiguous()
    batch, positions, q_heads, width = q.shape
    k_heads, half = k.shape[2], cos.shape[-1]
    rotated = empty(q), empty(k)
    constants = _constants(key_of(q), half, max(q_heads, k_heads), width - 2 * half)
    heads = constants["HEADS"]
    launch(
        f"{KERNELS}.rotate_heads",
        batch * positions * (blocks(q_heads, heads) + blocks(k_heads, heads)),
        q,
        *(q, k, *rotated, cos, sin, positions, q_heads, k_heads, half, width),
        *q.stride()[:3],
        *k.stride()[:3],
        # Stride 0 broadcasts the angles over the batch.
        *(cos.stride(0) if len(cos) > 1 else 0, cos.stride(1)),
        INVERSE=inverse,
        INTERLEAVED=interleaved,
        **constants,
    )
    return rotated


def _constants(key: TableKey, half: int, heads: int, passthrough: int) -> dict[str, int]:
    """Return the constants of a launch.

    Args:
        key: chip and dtype.
        half: number of rotated pairs, R/2.
        heads: number of heads of q or k, the larger of the two.
        passthrough: number of pass-through features.
    """
    values, block = ROTATE.values(key, half), power_of_two(half)
    return {
        "HEADS": min(max(values["ELEMENTS"] // block, 1), power_of_two(heads)),
        "HALF": block,
        "PASSTHROUGH": power_of_two(passthrough) if passthrough else 0,
        "num_warps": values["num_warps"],
    }


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library: head dims 64 and 128, both directions."""
    for half, interleaved, inverse in product((32, 64), (False, True), (False, True)):
        yield entry(
            "rotary",
            f"{KERNELS}.rotate_heads",
            dtype,
            f"{2 * half}{'_interleaved' * interleaved}{'_back' * inverse}",
            {
                **_constants(TableKey(chip, DTYPES[dtype]), half, 32, 0),
                "INTERLEAVED": interleaved,
                "INVERSE": inverse,
            },
            "batch * positions * (cdiv(q_heads, HEADS) + cdiv(k_heads, HEADS))",
            fp32="COS SIN",
            limits={"half": "HALF", "width": "2 * half"},
            extra=("batch",),
        )


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "q and k in one launch; saves only the angles",
    tuned=TUNED,
    entries=entries,
    forward=_forward,
    backward=_backward,
    saves=("cos", "sin"),
)

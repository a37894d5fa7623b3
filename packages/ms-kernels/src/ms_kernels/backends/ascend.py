"""Shared code of the adapters for torch_npu's fused operators on Ascend.

An adapter checks the constraints that the operator's Meta kernel does not check, converts layouts
and dtypes to the ones it supports, and supplies a gradient where it has none. `torch.ops.npu` is
looked up at call time, so an adapter can be imported without torch_npu; no call reaches it then,
because without torch_npu no tensor is on an ``npu`` device.

The limits are from CANN's documentation for Atlas A2 training chips (Ascend910B).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.call import Call, describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes that the cube unit multiplies."""

REALS = (torch.float32, *HALVES)
"""Dtypes that most fused operators support; none supports float64."""


def empty(call: Call) -> str | None:
    """Decline empty tensors, which CANN's kernels reject or leave uninitialized."""
    for tensor in call.present:
        if 0 in tensor.shape:
            return f"does not support empty tensors, and one has shape {describe(tensor.shape)}"
    return None


def same_dtype(call: Call) -> str | None:
    """Decline empty tensors, and a weight (the last tensor) of another dtype than x (the first)."""
    x, *_, weight = call.present
    if weight.dtype != x.dtype:
        return f"needs a weight of {describe(x.dtype)}, as x is, not {describe(weight.dtype)}"
    return empty(call)


def within_classes(targets: Tensor, ignored: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Replace ignored and out-of-range targets by 0; also return the mask of out-of-range targets.

    Fused operators then never index beyond the logits, and no device synchronization is needed.
    """
    out_of_range = (targets < 0) | (targets >= count)
    return targets.masked_fill(ignored | out_of_range, 0), out_of_range


def on_npu(
    contract: Contract,
    run: Callable[..., Any],
    merit: str,
    *,
    refuses: Callable[[Call], str | None] = empty,
    dtypes: tuple[torch.dtype, ...] = REALS,
) -> Implementation:
    """Return an implementation for Ascend."""
    return Implementation(
        operator=contract.name,
        backend="ascend",
        run=run,
        devices=frozenset({"npu"}),
        dtypes=dtypes,
        refuses=refuses,
        merit=merit,
    )


def refused(contract: Contract, reason: str) -> Implementation:
    """Return an Ascend placeholder that declines every call, as torch_npu has no suitable operator.

    Calls go to our Triton kernels if triton-ascend is installed, otherwise to the reference.
    """

    def absent(*args: Any) -> Any:
        raise AssertionError(f"{contract.name} was refused: torch_npu {reason}")

    return on_npu(contract, absent, f"none: torch_npu {reason}", refuses=lambda call: reason)

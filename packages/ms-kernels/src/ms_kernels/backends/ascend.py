"""torch_npu's fused operators on Ascend: what their adapters have in common.

An adapter checks what the operator's own Meta kernel does not, brings layouts and dtypes to what
it takes, and brings a gradient where it has none. `torch.ops.npu` is looked up as a call is made:
to import an adapter costs nothing where torch_npu is absent, and no tensor is on a device of type
``npu`` where it is.

Limits are those of CANN's documentation for Atlas A2 training chips (Ascend910B).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.call import Call, describe
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of the cube unit."""

REALS = (torch.float32, *HALVES)
"""Dtypes that most operators take; none takes float64."""


def empty(call: Call) -> str | None:
    """Decline empty tensors, which CANN's kernels refuse or leave undefined."""
    for each in call.present:
        if 0 in each.shape:
            return f"takes no empty tensor, and one is of shape {describe(each.shape)}"
    return None


def same_dtype(call: Call) -> str | None:
    """Decline empty tensors, and a weight (the last tensor) of another dtype than the first's."""
    x, *_, weight = call.present
    if weight.dtype != x.dtype:
        return f"takes a weight of {describe(x.dtype)}, as x is, not {describe(weight.dtype)}"
    return empty(call)


def within_classes(targets: Tensor, ignored: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the targets with 0 for those that are ignored or no class, and which are no class.

    No fused operator is then given an index beyond the logits, and no device is waited for.
    """
    foreign = (targets < 0) | (targets >= count)
    return targets.masked_fill(ignored | foreign, 0), foreign


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
    """Return what stands for Ascend where torch_npu's own operator does not fit.

    Our Triton kernels take the call where triton-ascend is installed, else the reference.
    """

    def absent(*given: Any) -> Any:
        raise AssertionError(f"{contract.name} was refused: torch_npu {reason}")

    return on_npu(contract, absent, f"none: torch_npu {reason}", refuses=lambda call: reason)

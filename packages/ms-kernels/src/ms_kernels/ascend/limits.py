"""What many of torch_npu's fused operators have in common."""

import torch
from torch import Tensor

from ms_kernels.contract import Call, Fact, describe

__all__ = ["HALVES", "NPU", "REALS", "classes_of", "empty", "given"]

NPU = frozenset({"npu"})
"""The device type of Ascend chips."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of the cube unit."""

REALS = (torch.float32, *HALVES)
"""Dtypes that most operators take; none takes float64."""


def given(call: Call) -> list[Fact]:
    """Return the facts of the tensors that were passed."""
    return [fact for fact in call.facts if fact is not None]


def classes_of(targets: Tensor, ignored: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return targets that are all classes, 0 where one is ignored or none, and where it is none.

    Fused operators get no index that they would follow out of the logits; nothing is waited for.
    """
    foreign = (targets < 0) | (targets >= count)
    return targets.masked_fill(ignored | foreign, 0), foreign


def empty(call: Call) -> str | None:
    """Decline empty tensors, which CANN's kernels refuse or leave undefined."""
    for fact in given(call):
        if 0 in fact.shape:
            return f"takes no empty tensor, and one is of shape {describe(fact.shape)}"
    return None

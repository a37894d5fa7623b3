"""What many of torch_npu's fused operators have in common."""

import torch

from ms_kernels.contract import Call, Fact, describe

__all__ = ["HALVES", "NPU", "REALS", "empty", "given"]

NPU = frozenset({"npu"})
"""The device type of Ascend chips."""

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes of the cube unit."""

REALS = (torch.float32, *HALVES)
"""Dtypes that most operators take; none takes float64."""


def given(call: Call) -> list[Fact]:
    """Return the facts of the tensors that were passed."""
    return [fact for fact in call.facts if fact is not None]


def empty(call: Call) -> str | None:
    """Decline empty tensors, which CANN's kernels refuse or leave undefined."""
    for fact in given(call):
        if 0 in fact.shape:
            return f"takes no empty tensor, and one is of shape {describe(fact.shape)}"
    return None

"""Our own kernels in Triton: CUDA and AMD GPUs, and Ascend NPUs through triton-ascend.

Triton is imported by the first call that needs it, so that importing the package stays fast and
needs nothing. What is chosen depends on whether it is installed, never on what was timed.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ms_kernels.contract import Call
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS"]

DEVICES = frozenset({"cuda", "npu"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WIDEST_ROW = 65_536
"""Features of a row that a normalisation holds at once."""


@cache
def _absent() -> str | None:
    """Say that Triton is not installed, or None."""
    if sys.modules.get("triton", ...) is None or find_spec("triton") is None:
        return "needs triton, which is not installed: pip install 'ms-kernels[cuda]'"
    return None


def _refuses(module: str, limit: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
    """Return why a call of the kernels in `module` is declined."""

    def refuses(call: Call) -> str | None:
        if call.compiling:
            return "torch.compile fuses the reference by itself"
        return _absent() or limit(call)

    return refuses


def _anything(call: Call) -> str | None:
    return None


def _rows(call: Call) -> str | None:
    """Decline rows that no program holds."""
    fact = call.facts[0]
    assert fact is not None
    if fact.shape[-1] > WIDEST_ROW:
        return f"holds rows of up to {WIDEST_ROW} features, not {fact.shape[-1]}"
    return None


def _run(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a kernel's module when it is first called."""

    def run(*arguments: Any, **options: Any) -> Any:
        found = import_module(f"ms_kernels.triton.{module}")
        return getattr(found, name)(*arguments, **options)

    return run


def _implementation(
    operator: str, module: str, merit: str, limit: Callable[[Call], str | None] = _anything
) -> Implementation:
    return Implementation(
        operator=operator,
        backend="triton",
        run=_run(module, operator),
        devices=DEVICES,
        dtypes=DTYPES,
        refuses=_refuses(module, limit),
        merit=merit,
    )


def _attention(call: Call) -> str | None:
    """Decline heads too wide for a multiprocessor's memory."""
    q = call.facts[0]
    assert q is not None
    if q.shape[-1] > 256:
        return f"takes heads of up to 256 features, not {q.shape[-1]}"
    for name, fact in zip("qkv", call.facts, strict=False):
        if fact is not None and fact.strides[1] > 2**23:
            return f"takes strides between positions up to {2**23}; {name} has {fact.strides[1]}"
    return None


IMPLEMENTATIONS = (
    _implementation(
        "rms_norm",
        "rms_norm",
        "one pass over memory each way; saves x and one number a row",
        _rows,
    ),
    _implementation(
        "rotary",
        "rotary",
        "q and k in one launch; saves only the angles",
    ),
    _implementation(
        "swiglu",
        "gated",
        "one pass over memory each way; saves only gate and up",
    ),
    _implementation(
        "attention",
        "attention",
        "never holds the scores; skips what mask, window and documents hide",
        _attention,
    ),
    _implementation(
        "cross_entropy",
        "cross_entropy",
        "reads the logits once forward, and once more for their gradient",
    ),
    _implementation(
        "linear_cross_entropy",
        "linear_cross_entropy",
        "half-precision products summed in float32, one chunk of logits at a time",
    ),
)

"""Decides when a call gets one of our Triton kernels.

Triton is imported by the first launch, so that importing the package stays fast and needs
nothing. What is chosen depends on whether it is installed, never on what was timed.
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ms_kernels.contracts.call import Call
from ms_kernels.contracts.contract import Contract
from ms_kernels.core.choice import Implementation
from ms_kernels.core.entries import Entry
from ms_kernels.core.launches import TunedKernel
from ms_kernels.core.torch_operator import opaque
from ms_kernels.core.tracing import known_when_traced

WIDEST_ROW = 65_536
"""Features of a row that a normalization holds at once."""

WIDEST_HEAD = 256
"""Features of a head of attention: a block of them must fit a multiprocessor's memory."""

LARGEST_STRIDE = 2**23
"""Between positions of attention, in elements: a block of rows stays within 32-bit offsets."""


@known_when_traced
@cache
def _absent() -> str | None:
    """Say that Triton is not installed, or None."""
    if sys.modules.get("triton", ...) is None or find_spec("triton") is None:
        return "needs triton, which is not installed: pip install 'ms-kernels[cuda]'"
    return None


@known_when_traced
@cache
def _foreign() -> str | None:
    """Say that the Triton that is installed makes nothing for Ascend, or None."""
    if find_spec("triton.backends.ascend") is None:
        return "needs triton-ascend on an NPU; the triton that is installed is for other chips"
    return None


def narrow_rows(call: Call) -> str | None:
    """Decline rows that no program holds."""
    width = call.present[0].shape[-1]
    if width > WIDEST_ROW:
        return f"holds rows of up to {WIDEST_ROW} features, not {width}"
    return None


def narrow_heads(call: Call) -> str | None:
    """Decline heads too wide for a multiprocessor's memory, and strides beyond 32 bits."""
    for each in call.present[:3]:
        if each.shape[-1] > WIDEST_HEAD:
            return f"takes heads of up to {WIDEST_HEAD} features, not {each.shape[-1]}"
        if each.strides[1] > LARGEST_STRIDE:
            return f"takes strides of positions up to {LARGEST_STRIDE}, not {each.strides[1]}"
    return None


def on_gpu(
    contract: Contract,
    merit: str,
    *,
    tuned: tuple[TunedKernel, ...],
    entries: Callable[[str, str], Iterable[Entry]],
    refuses: Callable[[Call], str | None] = lambda call: None,
    run: Callable[..., Any] | None = None,
    **passes: Any,
) -> Implementation:
    """Return an implementation by our kernels; its version is that of the tuned ones.

    Args:
        contract: the operator.
        merit: why it is preferred to those after it.
        tuned: kernels whose launch parameters stand in tuning tables.
        entries: kernels that a library for a GPU holds, from chip and dtype.
        refuses: why it cannot take a call, or None if it can.
        run: what performs it; made by `opaque` if None.
        **passes: what `opaque` takes: `forward`, `backward` and the like.
    """

    def declines(call: Call) -> str | None:
        return _absent() or (_foreign() if call.device.type == "npu" else None) or refuses(call)

    return Implementation(
        operator=contract.name,
        backend="triton",
        run=run or opaque(contract, "triton", **passes),
        devices=frozenset({"cuda", "npu"}),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        subclasses=bool(contract.splits),
        refuses=declines,
        merit=merit,
        version=tuned[0].version,
        tuned=tuned,
        entries=entries,
    )

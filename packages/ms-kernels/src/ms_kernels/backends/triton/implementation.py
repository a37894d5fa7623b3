"""Selects our Triton kernels for a call.

Triton is imported at the first launch, so importing the package is fast and does not require it.
The selection depends on whether Triton is installed, never on timings.
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

MAX_ROW_WIDTH = 65_536
"""Maximum row width of a normalization, whose block spans a full row."""

MAX_HEAD_WIDTH = 256
"""Maximum head dimension of attention: a block of rows must fit in shared memory."""

MAX_STRIDE = 2**23
"""Maximum stride between positions of attention, in elements: block offsets are 32 bits wide."""


@known_when_traced
@cache
def _absent() -> str | None:
    """Return the reason if Triton is not installed, otherwise None."""
    # A module that is None in sys.modules cannot be imported.
    if sys.modules.get("triton", ...) is None or find_spec("triton") is None:
        return "needs triton, which is not installed: pip install 'ms-kernels[cuda]'"
    return None


@known_when_traced
@cache
def _foreign() -> str | None:
    """Return the reason if the installed Triton does not support Ascend, otherwise None."""
    if find_spec("triton.backends.ascend") is None:
        return "needs triton-ascend on an NPU; the installed triton does not support it"
    return None


def narrow_rows(call: Call) -> str | None:
    """Decline rows too wide for one program."""
    width = call.present[0].shape[-1]
    if width > MAX_ROW_WIDTH:
        return f"supports rows of up to {MAX_ROW_WIDTH} features, not {width}"
    return None


def narrow_heads(call: Call) -> str | None:
    """Decline heads too wide for shared memory, and strides too large for 32-bit offsets."""
    for tensor in call.present[:3]:
        if tensor.shape[-1] > MAX_HEAD_WIDTH:
            return f"supports heads of up to {MAX_HEAD_WIDTH} features, not {tensor.shape[-1]}"
        if tensor.strides[1] > MAX_STRIDE:
            return f"supports strides of positions up to {MAX_STRIDE}, not {tensor.strides[1]}"
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
    """Return a Triton implementation; its version is the version of its tuned kernels.

    Args:
        contract: contract of the operator.
        merit: advantage over the implementations after it.
        tuned: kernels whose launch parameters are in the tuning tables.
        entries: kernels of an ahead-of-time GPU library, as a function of chip and dtype.
        refuses: reason to decline a call, or None to accept it.
        run: callable that runs the operator; built by `opaque` if None.
        **passes: arguments of `opaque`, such as `forward` and `backward`.
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

"""Our own kernels in Triton: CUDA and AMD GPUs, and Ascend NPUs through triton-ascend.

Triton is imported by the first launch, so that importing the package stays fast and needs
nothing. What is chosen depends on whether it is installed, never on what was timed.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ms_kernels.contract import Call, Fact, describe
from ms_kernels.reference import CONTRACTS
from ms_kernels.registry import Implementation
from ms_kernels.tracing import known_when_traced
from ms_kernels.triton import (
    adamw_step,
    attention,
    cross_entropy,
    decode_attention,
    experts,
    gated,
    layer_norm,
    linear_cross_entropy,
    quantized_linear,
    rms_norm,
    rotary,
    token_log_probs,
)
from ms_kernels.triton.configuration import TUNED, VERSIONS

__all__ = ["IMPLEMENTATIONS"]

DEVICES = frozenset({"cuda", "npu"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WIDEST_ROW = 65_536
"""Features of a row that a normalisation holds at once."""

WIDEST_HEAD = 256
"""Features of a head of attention: a block of them must fit a multiprocessor's memory."""

LARGEST_STRIDE = 2**23
"""Between positions of attention, in elements: a block of rows stays within 32-bit offsets."""

MOST_EXPERTS = 1024
"""Experts whose counts each program reads."""


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


def _refuses(limit: Callable[[Call], str | None]) -> Callable[[Call], str | None]:
    """Return why a call is declined."""

    def refuses(call: Call) -> str | None:
        return _absent() or (_foreign() if call.device.type == "npu" else None) or limit(call)

    return refuses


def _anything(call: Call) -> str | None:
    return None


def _fact(call: Call, place: int) -> Fact:
    """Return the description of an argument that must be there."""
    fact = call.facts[place]
    assert fact is not None
    return fact


def _rows(call: Call) -> str | None:
    """Decline rows that no program holds."""
    width = _fact(call, 0).shape[-1]
    if width > WIDEST_ROW:
        return f"holds rows of up to {WIDEST_ROW} features, not {width}"
    return None


def _heads(call: Call) -> str | None:
    """Decline heads too wide for a multiprocessor's memory, and strides beyond 32 bits."""
    width = _fact(call, 0).shape[-1]
    if width > WIDEST_HEAD:
        return f"takes heads of up to {WIDEST_HEAD} features, not {width}"
    for place in range(3):
        fact = _fact(call, place)
        if fact.strides[1] > LARGEST_STRIDE:
            return f"takes strides of positions up to {LARGEST_STRIDE}, not {fact.strides[1]}"
    return None


def _experts(call: Call) -> str | None:
    """Decline more experts than a program reads."""
    count = _fact(call, 1).shape[0]
    return f"takes up to {MOST_EXPERTS} experts, not {count}" if count > MOST_EXPERTS else None


def _contiguous(call: Call) -> str | None:
    """Decline what cannot be stepped as one run of numbers, and moments of float64."""
    moments = _fact(call, 2).dtype
    if moments != torch.float32:
        return f"keeps moments in float32, not {describe(moments)}"
    for argument, fact in zip(CONTRACTS["adamw_step"].arguments, call.facts, strict=True):
        expected = 1
        for size, stride in zip(*(reversed(_some(fact)[at]) for at in (0, 3)), strict=True):
            if size != 1 and stride != expected:
                return f"writes contiguous tensors in place; {argument.name} is not contiguous"
            expected *= size
    return None


def _some(fact: Fact | None) -> Any:
    assert fact is not None
    return fact


def _implementation(
    operator: str,
    run: Callable[..., Any],
    merit: str,
    limit: Callable[[Call], str | None] = _anything,
) -> Implementation:
    return Implementation(
        operator=operator,
        backend="triton",
        run=run,
        devices=DEVICES,
        dtypes=DTYPES,
        subclasses=bool(CONTRACTS[operator].splits),
        refuses=_refuses(limit),
        merit=merit,
        version=VERSIONS.get(operator, 1),
        tuned=TUNED[operator],
    )


IMPLEMENTATIONS = (
    _implementation(
        "rms_norm",
        rms_norm.rms_norm,
        "one pass over memory each way; saves x and one number a row",
        _rows,
    ),
    _implementation(
        "add_rms_norm",
        rms_norm.add_rms_norm,
        "adds and normalises in one pass; saves the sum and one number a row",
        _rows,
    ),
    _implementation(
        "layer_norm",
        layer_norm.layer_norm,
        "one pass over memory each way; saves x and two numbers a row",
        _rows,
    ),
    _implementation("rotary", rotary.rotary, "q and k in one launch; saves only the angles"),
    _implementation(
        "swiglu", gated.swiglu, "one pass over memory each way; saves only gate and up"
    ),
    _implementation("geglu", gated.geglu, "one pass over memory each way; saves only gate and up"),
    _implementation(
        "attention",
        attention.attention,
        "never holds the scores; skips what mask, window and documents hide",
        _heads,
    ),
    _implementation(
        "decode_attention",
        decode_attention.decode_attention,
        "reads each page once, many parts of a sequence at a time",
        _heads,
    ),
    _implementation(
        "cross_entropy",
        cross_entropy.cross_entropy,
        "reads the logits once forward, and once more for their gradient",
    ),
    _implementation(
        "linear_cross_entropy",
        linear_cross_entropy.linear_cross_entropy,
        "half-precision products summed in float32, one chunk of logits at a time",
    ),
    _implementation(
        "token_log_probs",
        token_log_probs.token_log_probs,
        "half-precision products summed in float32, one chunk of logits at a time",
    ),
    _implementation(
        "permute_tokens",
        experts.permute_tokens,
        "gathers both ways, where plain torch adds atomically",
    ),
    _implementation(
        "unpermute_tokens",
        experts.unpermute_tokens,
        "weighs and sums in one pass; gradients without atomic additions",
    ),
    _implementation(
        "grouped_matmul",
        experts.grouped_matmul,
        "all experts in one launch, without waiting for their counts",
        _experts,
    ),
    _implementation(
        "quantized_linear",
        quantized_linear.quantized_linear,
        "reads packed codes and unpacks them in registers",
    ),
    _implementation(
        "adamw_step", adamw_step.adamw_step, "one pass over memory, in place", _contiguous
    ),
)

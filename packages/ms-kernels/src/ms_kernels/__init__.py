"""Fused operators with one typed face and many backends, each proved against a reference."""

from ms_kernels.dispatch import use_backend
from ms_kernels.errors import ArgumentError, BackendError, KernelError
from ms_kernels.explanation import explain
from ms_kernels.ops import (
    attention,
    cross_entropy,
    linear_cross_entropy,
    rms_norm,
    rotary,
    swiglu,
)

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BackendError",
    "KernelError",
    "__version__",
    "attention",
    "cross_entropy",
    "explain",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "swiglu",
    "use_backend",
]

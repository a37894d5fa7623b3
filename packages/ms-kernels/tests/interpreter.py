"""Triton's interpreter with correct bfloat16: kernels run on the CPU in numpy, program by program.

The interpreter stores bfloat16 as the upper 16 bits of a float32 and has two bugs with it:
`tl.dot` multiplies these bits as integers (triton issue 11584), and casts from float32
truncate. Here operands are widened before a product, and casts round to nearest as in hardware.
"""

import os

import numpy as np

assert os.environ.get("TRITON_INTERPRET") == "1", "set it before triton is imported"

import triton.language as tl  # noqa: E402  (reads the variable on import)
from triton.runtime import interpreter  # noqa: E402

__all__ = ["correct_bfloat16"]


def _widen(handle):
    """Return a matrix in a dtype that numpy can multiply."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_widen(a), _widen(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _to_bfloat16(values):
    """Return the upper 16 bits of float32 numbers, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


_cast = interpreter.InterpreterBuilder.cast_impl


def _create_cast(self, source, dtype):
    if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_to_bfloat16(source.data), tl.bfloat16)
    return _cast(self, source, dtype)


def correct_bfloat16():
    """Patch the interpreter's casts and products for bfloat16."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.cast_impl = _create_cast

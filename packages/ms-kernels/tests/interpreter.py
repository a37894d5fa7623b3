"""Triton's interpreter, set right: kernels run on the CPU, one program after another, in numpy.

It holds bfloat16 as the upper 16 bits of a float32, and is wrong about it twice: `tl.dot`
multiplies these as whole numbers (triton issue 11584), and a cast from float32 cuts the lower bits
off. Here they are widened before a product, and rounded to the nearest, as hardware does.
"""

import os

import numpy as np

assert os.environ.get("TRITON_INTERPRET") == "1", "set it before triton is imported"

import triton.language as tl  # noqa: E402  (it reads the variable as it is imported)
from triton.runtime import interpreter  # noqa: E402

__all__ = ["correct_bfloat16"]


def _widened(handle):
    """Return the numbers of a matrix in a dtype that numpy multiplies."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_widened(a), _widened(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _to_bfloat16(values):
    """Return the upper 16 bits of float32 numbers, rounded to the nearest, half to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


_cast = interpreter.InterpreterBuilder.cast_impl


def _create_cast(self, source, kind):
    if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_to_bfloat16(source.data), tl.bfloat16)
    return _cast(self, source, kind)


def correct_bfloat16():
    """Make the interpreter's casts and products right for bfloat16."""
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter.InterpreterBuilder.cast_impl = _create_cast

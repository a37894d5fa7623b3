"""Triton's interpreter, set right: kernels run on the CPU, one program after another, in numpy.

It holds bfloat16 as the upper 16 bits of a float32, and multiplies these as whole numbers in
`tl.dot` (triton issue 11584). Here they are widened before a product, as the hardware does.
"""

import os

import numpy as np

assert os.environ.get("TRITON_INTERPRET") == "1", "set it before triton is imported"

import triton.language as tl  # noqa: E402  (it reads the variable as it is imported)
from triton.runtime import interpreter  # noqa: E402

__all__ = ["correct_dot"]


def _widened(handle):
    """Return the numbers of a matrix in a dtype that numpy multiplies."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = np.matmul(_widened(a), _widened(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def correct_dot():
    """Make the interpreter's products right for bfloat16."""
    interpreter.InterpreterBuilder.create_dot = _create_dot

"""torch_npu on a machine without an NPU and without CANN; its device memory is host memory.

The public torch_npu wheel runs unmodified. Stub libraries generated from symbol names
(`symbols`, `stubs`) provide what it expects from CANN. Every aclnn operator with a body
(`bodies`) is computed on the CPU by the formulas of CANN's documentation; a call without a body
is refused, so no result is ever undefined. `record` lists the calls that were made.

This proves that calls are well-formed, shows their results if CANN follows its documentation,
and counts them. It proves nothing about speed, memory, or rounding and limits of CANN's kernels.
"""

from .bridge import Call, record
from .errors import NullRuntimeError
from .start import start

__all__ = ["Call", "NullRuntimeError", "record", "start"]

"""torch_npu on a machine with neither an NPU nor CANN, its device memory the host's.

The public wheel of torch_npu is run as it is. What it wants of CANN is offered by stub libraries
made from symbol names alone (`symbols`, `stubs`); every aclnn operator that has a body (`bodies`)
is computed on the CPU, after the formulas of CANN's documentation; one without a body is refused
as it is called, so no result is ever undefined. `record` lists the calls that were made.

It proves that calls are well-formed, what they compute if CANN keeps its documentation, and how
many there are. It proves nothing about speed, memory, or what CANN's kernels round and refuse.
"""

from .bridge import Call, record
from .errors import NullRuntimeError
from .start import start

__all__ = ["Call", "NullRuntimeError", "record", "start"]

"""GEGLU in cache-sized blocks of rows; saves only its inputs for backward."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.operators.geglu.contract import CONTRACT
from ms_kernels.operators.swiglu.cpu import MERIT, gated


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Return ``gelu(gate) · up``."""
    slope = torch.ops.aten.gelu_backward.grad_input
    functions = (partial(function, approximate=approximate) for function in (F.gelu, slope))
    return gated(gate, up, *functions)


IMPLEMENTATION = on_cpu(CONTRACT, geglu, MERIT)

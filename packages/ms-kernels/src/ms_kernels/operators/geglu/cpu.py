"""GEGLU in blocks of rows, saving nothing but its inputs for the backward pass."""

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
    functions = (partial(each, approximate=approximate) for each in (F.gelu, slope))
    return gated(gate, up, *functions)


IMPLEMENTATION = on_cpu(CONTRACT, geglu, MERIT)

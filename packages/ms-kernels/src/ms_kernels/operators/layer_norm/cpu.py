"""LayerNorm by torch's fused kernel, in one pass over memory with float32 sums."""

import torch.nn.functional as F
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import accumulator
from ms_kernels.operators.layer_norm.contract import CONTRACT


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) · weight + bias``."""
    # In half precision torch rounds partial weight gradients before summing them: compute wide.
    wide = accumulator(x.dtype)
    bias = bias if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias, eps).to(x.dtype)


IMPLEMENTATION = on_cpu(CONTRACT, layer_norm, "torch's fused kernel, one pass over memory")

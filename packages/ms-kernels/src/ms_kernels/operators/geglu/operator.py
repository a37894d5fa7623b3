"""The public function `geglu`."""

from typing import Literal

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.geglu.contract import CONTRACT


def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Feed-forward gate with GELU (arXiv 2002.05202).

    Args:
        gate: (..., I).
        up: (..., I), dtype of gate.
        approximate: ``"none"`` for the exact GELU, ``"tanh"`` for the approximation in Gemma.

    Returns:
        ``gelu(gate) · up``, (..., I), dtype of gate.
    """
    return perform(CONTRACT, (gate, up), (approximate,))

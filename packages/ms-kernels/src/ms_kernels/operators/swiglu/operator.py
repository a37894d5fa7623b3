"""The public function `swiglu`."""

from torch import Tensor

from ms_kernels.core.dispatch import perform
from ms_kernels.operators.swiglu.contract import CONTRACT


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Feed-forward gate with SiLU (arXiv 2002.05202).

    Args:
        gate: (..., I).
        up: (..., I), dtype of gate.

    Returns:
        ``silu(gate) · up``, (..., I), dtype of gate.
    """
    return perform(CONTRACT, (gate, up), ())

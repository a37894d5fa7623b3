"""Tolerances between a result and the float64 reference on the same inputs.

A backend that accumulates in float32 and rounds its result once is off by half a unit in the last
place of the dtype (``eps / 2``), plus the float32 accumulation error: sums of up to about 1,000
terms lose less than ``1e-5`` of the largest partial sum. The relative tolerances allow two
roundings (``eps``). The absolute ones cover results that are small because larger terms cancelled,
for inputs of order one.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """``|got - truth| <= relative * |truth| + absolute``, the truth computed in float64."""

    relative: float
    absolute: float


class OperatorTolerances(NamedTuple):
    """Tolerances of an operator's results and gradients, by dtype."""

    results: Mapping[torch.dtype, Tolerance]
    gradients: Mapping[torch.dtype, Tolerance]


_RESULTS = MappingProxyType(
    {
        torch.float64: Tolerance(1e-12, 1e-12),
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(2**-7, 2**-10),
        torch.float16: Tolerance(2**-10, 2**-13),
    }
)

# A gradient passes through the operator twice: forward, for tensors saved in the input's dtype, and
# backward. Hence twice the relative error, plus the cancellation of larger terms.
_GRADIENTS = MappingProxyType(
    {
        torch.float64: Tolerance(1e-11, 1e-11),
        torch.float32: Tolerance(2e-5, 5e-5),
        torch.bfloat16: Tolerance(2**-6, 2**-7),
        torch.float16: Tolerance(2**-9, 2**-10),
    }
)


def _cancelling(
    like: Mapping[torch.dtype, Tolerance], bfloat16: float, float16: float
) -> Mapping[torch.dtype, Tolerance]:
    """Replace the absolute tolerances in half precision, for results where more terms cancel."""
    absolute = {torch.bfloat16: bfloat16, torch.float16: float16}
    wider = {dtype: like[dtype]._replace(absolute=limit) for dtype, limit in absolute.items()}
    return MappingProxyType({**like, **wider})


ROUNDED_ONCE = OperatorTolerances(_RESULTS, _GRADIENTS)
"""Sums in float32, and one rounding of the result."""

# Fused attention rounds the probabilities to the inputs' dtype before multiplying by v: an error
# of eps / 2 of Σ p·|v|, even if Σ p·v cancels. For |v| up to 4 that is 2 eps in the worst case, 1
# eps for independent roundings. Backward rounds p, its gradient (a dot product over D features, of
# order sqrt(D)) and the saved result: four times the error.
ATTENTION = OperatorTolerances(
    _cancelling(_RESULTS, 2**-7, 2**-10), _cancelling(_GRADIENTS, 2**-5, 2**-8)
)
"""For probabilities that are rounded before the product with v."""

# A residual sum is rounded before use, so each row's term of a weight gradient is off by up to
# eps / 2. Over R rows of order one these errors add up to eps / 2 · sqrt(R) at random: 8 eps for
# 256 rows, and twice that for the worst of a few hundred features.
SUMMED = OperatorTolerances(_RESULTS, _cancelling(_GRADIENTS, 2**-3, 2**-6))
"""For a residual sum that is rounded before use."""

# Logit gradients are rounded to the inputs' dtype before the product with hidden or weight: an
# error of up to eps / 2 relative to a gradient of about -1 at the target, times the row's own
# gradient. With values and row gradients up to 4 that is 8 eps in the worst case, 4 eps typically.
LOGITS = OperatorTolerances(_RESULTS, _cancelling(_GRADIENTS, 2**-5, 2**-8))
"""For logit gradients that are rounded before the product with hidden or weight."""

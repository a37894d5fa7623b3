"""Tolerances: how far a result may lie from the reference in float64, given the same inputs.

A backend that accumulates in float32 and rounds its result once is off by half a unit in the
last place of the dtype (``eps / 2``), plus what float32 lost on the way: sums of up to about
1,000 terms in float32 lose less than ``1e-5`` of the largest partial sum. The relative numbers
below allow two roundings (``eps``) where there is one, the absolute ones are for results that
are small because larger terms cancelled, at inputs of order one.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """``|got - truth| <= relative * |truth| + absolute``, the truth computed in float64."""

    relative: float
    absolute: float


class Tolerances(NamedTuple):
    """How far an operator may lie from the truth, by dtype."""

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

# A gradient passes through the operator twice: once forward, for what was saved in the input's
# dtype, and once back. Twice the relative error, and the cancellation of larger terms.
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
    """Return other absolute tolerances in half precision, where more terms cancel."""
    absolute = {torch.bfloat16: bfloat16, torch.float16: float16}
    wider = {dtype: like[dtype]._replace(absolute=limit) for dtype, limit in absolute.items()}
    return MappingProxyType({**like, **wider})


ROUNDED_ONCE = Tolerances(_RESULTS, _GRADIENTS)
"""Sums in float32, and one rounding of the result."""

# Fused attention rounds the probabilities to the inputs' dtype before it multiplies them by v:
# off by eps / 2 of Σ p·|v|, whatever cancels in Σ p·v. At |v| up to 4 that is 2 eps at worst, one
# eps of a sum of independent roundings. Backward it rounds p, its gradient (a product over D
# features, of order sqrt(D)) and the saved result: four times as much in the same sense.
ATTENTION = Tolerances(_cancelling(_RESULTS, 2**-7, 2**-10), _cancelling(_GRADIENTS, 2**-5, 2**-8))
"""Probabilities are rounded before they meet the values."""

# A residual sum is rounded before it is used, so each row's part of a weight's gradient is off by
# up to eps / 2 of itself. Over R rows of order one these add up at random to eps / 2 · sqrt(R):
# at 256 rows, 8 eps; twice that for the farthest of a few hundred features.
SUMMED = Tolerances(_RESULTS, _cancelling(_GRADIENTS, 2**-3, 2**-6))
"""A residual sum is rounded before it is used."""

# A gradient of logits is rounded to the inputs' dtype before it meets hidden or weight: off by up
# to eps / 2 of itself, which is about -1 at the target, times the row's own gradient. Against
# numbers up to 4 and rows' gradients up to 4 that is 8 eps at worst, 4 eps of what is likely.
LOGITS = Tolerances(_RESULTS, _cancelling(_GRADIENTS, 2**-5, 2**-8))
"""A gradient of logits is rounded before it meets hidden or weight."""

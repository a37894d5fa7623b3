"""How far a result may lie from the truth computed in float64 from the same rounded inputs.

A backend that accumulates in float32 and rounds its result once is off by half a unit in the
last place of the dtype (``eps / 2``), plus what float32 lost on the way: sums of up to about
1,000 terms in float32 lose less than ``1e-5`` of the largest partial sum. The relative figures
below allow two roundings (``eps``) where there is one, the absolute ones are for results that
are small because larger terms cancelled, at inputs of order one.
"""

from types import MappingProxyType

import torch

from ms_kernels.contract import Tolerance

__all__ = [
    "ATTENTION_GRADIENTS",
    "ATTENTION_RESULTS",
    "GRADIENTS",
    "LOGIT_GRADIENTS",
    "RESULTS",
    "SUMMED_GRADIENTS",
]

RESULTS = MappingProxyType(
    {
        torch.float64: Tolerance(1e-12, 1e-12),
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(2**-7, 2**-10),
        torch.float16: Tolerance(2**-10, 2**-13),
    }
)

# A gradient passes through the operator twice: once forward, for what was saved in the input's
# dtype, and once back. Twice the relative error, and the cancellation of larger terms.
GRADIENTS = MappingProxyType(
    {
        torch.float64: Tolerance(1e-11, 1e-11),
        torch.float32: Tolerance(2e-5, 5e-5),
        torch.bfloat16: Tolerance(2**-6, 2**-7),
        torch.float16: Tolerance(2**-9, 2**-10),
    }
)

# Fused attention rounds the probabilities to the inputs' dtype before it multiplies them by v:
# off by eps / 2 of Σ p·|v|, whatever cancels in Σ p·v. At |v| up to 4 that is 2 eps at worst, one
# eps of a sum of independent roundings.
ATTENTION_RESULTS = MappingProxyType(
    {
        **RESULTS,
        torch.bfloat16: Tolerance(2**-7, 2**-7),
        torch.float16: Tolerance(2**-10, 2**-10),
    }
)

# Backward it rounds p, its gradient (a product over D features, of order sqrt(D)) and the saved
# result: four times as much in the same sense.
ATTENTION_GRADIENTS = MappingProxyType(
    {
        **GRADIENTS,
        torch.bfloat16: Tolerance(2**-6, 2**-5),
        torch.float16: Tolerance(2**-9, 2**-8),
    }
)

# A residual sum is rounded before it is used, so each row's part of a weight's gradient is off by
# up to eps / 2 of itself. Over R rows of order one these add up at random to eps / 2 · sqrt(R):
# at 256 rows, 8 eps; twice that for the farthest of a few hundred features.
SUMMED_GRADIENTS = MappingProxyType(
    {
        **GRADIENTS,
        torch.bfloat16: Tolerance(2**-6, 2**-3),
        torch.float16: Tolerance(2**-9, 2**-6),
    }
)

# A gradient of logits is rounded to the inputs' dtype before it meets hidden or weight: off by up
# to eps / 2 of itself, which is about -1 at the target, times the row's own gradient. Against
# numbers up to 4 and rows' gradients up to 4 that is 8 eps at worst, 4 eps of what is likely.
LOGIT_GRADIENTS = MappingProxyType(
    {
        **GRADIENTS,
        torch.bfloat16: Tolerance(2**-6, 2**-5),
        torch.float16: Tolerance(2**-9, 2**-8),
    }
)

"""Rounding to low-precision floating-point formats, in float32 arithmetic on any device.

Round to nearest, ties to even; magnitudes above the largest value saturate, as do infinities; NaN
stays NaN. torch's own casts differ between formats (E4M3 saturates, E5M2 overflows to infinity)
and have no E2M1, and a compiler removes a cast to lower precision and back.
"""

import torch
from torch import Tensor

from ms_compress.quantization.scheme import FloatFormat

EXPONENT_MASK = 0x7F800000
"""Exponent bits of float32; alone, they are the largest power of two up to a magnitude."""
MIN_E8M0 = 2.0**-127
"""Smallest E8M0 scale, a subnormal number of float32."""


def round_to_format(x: Tensor, element: FloatFormat) -> Tensor:
    """Round float32 values to a floating-point format, in place.

    Args:
        x: float32, any shape.
        element: format of the result.
    """
    x.clamp_(-element.high, element.high)
    # Neighbors are 2^(exponent - mantissa_bits) apart, down to the smallest normal exponent.
    spacing = binade(x).clamp_(min=2.0**element.min_exponent).mul_(2.0**-element.mantissa_bits)
    return x.div_(spacing).round_().mul_(spacing)  # exact, except for the rounding itself


def binade(x: Tensor) -> Tensor:
    """Return the largest power of two up to the magnitude of each float32; 0 for subnormals."""
    return x.contiguous().view(torch.int32).bitwise_and(EXPONENT_MASK).view(torch.float32)


def power_of_two_scale(peak: Tensor, element: FloatFormat) -> Tensor:
    """Return the E8M0 scale of a group from its largest magnitude, as compressed-tensors does.

    The exponent is that of the peak minus the format's largest exponent. A significand of 1.75 or
    more counts as the next power of two, so that E2M1 clips 7/6 of its range at most and E4M3
    nothing. The OCP specification rounds down instead.

    Args:
        peak: float32, not negative.
        element: format of the codes.
    """
    quarter = 1 << 21  # a quarter of the spacing of powers of two, in units of float32's last bit
    bits = peak.contiguous().view(torch.int32).add(quarter).bitwise_and(EXPONENT_MASK)
    scale = bits.view(torch.float32).mul(2.0**-element.max_exponent)
    return scale.clamp_(min=MIN_E8M0)


def round_to_power_of_two(x: Tensor) -> Tensor:
    """Round positive float32 values to the nearest power of two; halfway is up."""
    half = 1 << 22
    bits = x.contiguous().view(torch.int32).add(half).bitwise_and(EXPONENT_MASK)
    return bits.view(torch.float32).clamp_(min=MIN_E8M0)

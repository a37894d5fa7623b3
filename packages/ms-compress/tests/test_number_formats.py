"""Low-precision number formats round as their references do, for every bfloat16 input."""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from ms_compress.quantization.elements import (
    power_of_two_scale,
    round_to_format,
    round_to_power_of_two,
)
from ms_compress.quantization.scheme import E2M1, E4M3, E5M2, FloatFormat

REFERENCES = {
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (E5M2, ml_dtypes.float8_e5m2, torch.float8_e5m2),
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn, None),
}


def all_bfloat16() -> Tensor:
    """All 2^16 bfloat16 values as float32: zeros, subnormals, infinities and NaNs too."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def around_ties(element: FloatFormat) -> Tensor:
    """Each point between two neighbors of a format, and its next float32 values on both sides."""
    values = round_to_format(torch.linspace(0, element.high, 2**18), element).unique()
    ties = (values[1:] + values[:-1]) / 2
    infinity = torch.full_like(ties, torch.inf)
    points = torch.cat([ties, torch.nextafter(ties, infinity), torch.nextafter(ties, -infinity)])
    return torch.cat([points, -points])


@pytest.mark.parametrize("name", REFERENCES)
def test_every_bfloat16_is_rounded_as_in_ml_dtypes(name: str) -> None:
    """65,536 inputs and all ties, except that magnitudes beyond the format saturate."""
    element, reference, _ = REFERENCES[name]
    inputs = torch.cat([all_bfloat16(), around_ties(element)])
    ours = round_to_format(inputs.clone(), element)
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = torch.from_numpy(inputs.numpy().astype(reference).astype(np.float32))
    # ml_dtypes gives NaN or infinity beyond the format; saturation is ours and the runtime's.
    saturated = inputs.abs() > element.high
    in_range = ~saturated & ~inputs.isnan()
    assert int(in_range.sum()) > 32000
    assert torch.equal(ours[in_range].view(torch.int32), theirs[in_range].view(torch.int32))
    assert torch.equal(ours[saturated], inputs[saturated].sign() * element.high)
    assert bool(ours[inputs.isnan()].isnan().all())


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_bfloat16_is_rounded_as_by_the_cast_of_torch(name: str) -> None:
    """The casts differ beyond the format only: torch's E4M3 saturates and its E5M2 overflows."""
    element, _, dtype = REFERENCES[name]
    assert dtype is not None
    inputs = torch.cat([all_bfloat16(), around_ties(element)])
    ours = round_to_format(inputs.clone(), element)
    theirs = inputs.to(dtype).float()
    in_range = inputs.abs() <= element.high
    assert int(in_range.sum()) > 32000
    assert torch.equal(ours[in_range].view(torch.int32), theirs[in_range].view(torch.int32))
    assert torch.equal(torch.isnan(ours), torch.isnan(inputs))


def test_every_power_of_two_scale_is_that_of_compressed_tensors() -> None:
    """All bfloat16 magnitudes whose scale is finite, and E8M0 stores the scale exactly."""
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    peaks = all_bfloat16()
    peaks = peaks[(peaks >= 0) & (peaks < 2.0**127)]
    assert len(peaks) > 32000
    for element, bits in ((E2M1, 4), (E4M3, 8)):
        ours = power_of_two_scale(peaks, element)
        exponents = generate_mx_scales(peaks.clone(), bits).clamp(0, 255)
        theirs = torch.ldexp(torch.ones_like(exponents), (exponents - 127).int())
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.to(torch.float8_e8m0fnu).float(), ours)
        # E2M1 clips values above 6 of up to 7, and E4M3 none: its largest value is 1.75 · 2^8.
        assert float((peaks / ours).max()) < {4: 7.0, 8: 448.0}[bits]


def test_scales_are_rounded_to_e8m0_as_by_the_cast_of_torch() -> None:
    """To the nearest power of two, halfway up, for all positive finite bfloat16 values."""
    values = all_bfloat16()
    values = values[(values > 2.0**-126) & (values < 1.5 * 2.0**127)]
    assert len(values) > 32000
    expected = values.to(torch.float8_e8m0fnu).float()
    assert torch.equal(round_to_power_of_two(values), expected)

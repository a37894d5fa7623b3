"""The schemes of compressed-tensors: symmetric integers.

Source: `calculate_qparams` and `quantize` of compressed-tensors.
"""

from attrs import evolve

from ms_compress.quantization.scheme import Activations, Scheme

PER_TOKEN = Activations(
    bits=8,
    group=None,
    low=-128,
    high=127,
    scale_dtype="float32",
    by_inverse=False,
)
INT4_G32 = Scheme(
    name="ct.int4_g32",
    target="ct",
    bits=4,
    group=32,
    low=-8,
    high=7,
    signed_peak=False,
    rounding="even",
    by_inverse=False,
    exact_step=False,
    scale_dtype="float32",
    eps_for_zeros=True,
    embeddings=False,
)
INT3_G32 = evolve(INT4_G32, name="ct.int3_g32", bits=3, low=-4, high=3)
"""Readable by transformers; we know of no deployment kernel with 3 bits."""
W8A8 = evolve(
    INT4_G32,
    name="ct.w8a8",
    bits=8,
    group=None,
    low=-128,
    high=127,
    activations=PER_TOKEN,
    # `compute_dynamic_scales_and_zp` reduces all dims except the first two.
    input_ndim=3,
)
SCHEMES = (INT4_G32, INT3_G32, W8A8)
GROUPED = {"ct.int4": INT4_G32, "ct.int3": INT3_G32}
"""Schemes that can be named with another group size, such as `ct.int4_g64`."""

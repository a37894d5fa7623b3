"""The schemes of onnxruntime's MatMulNBits.

Source: `BlockwiseQuantizer` of MLAS, symmetric, which rounds after adding the zero point.
"""

from ms_compress.quantization.scheme import Scheme

MATMUL_NBITS = Scheme(
    name="ort.matmulnbits",
    target="ort",
    num_bits=4,
    group_size=32,
    groups=(16, 32, 64, 128, 256),
    low=-8,
    high=7,
    signed_peak=True,
    rounding="away_from_low",
    by_inverse=True,
    exact_step=False,
    scale_dtype="float32",
)
SCHEMES = (MATMUL_NBITS,)
GROUPED = {"ort.matmulnbits": MATMUL_NBITS}
"""Schemes that can be named with another group size, such as `ort.matmulnbits_g64`."""

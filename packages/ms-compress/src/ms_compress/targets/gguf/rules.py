"""The schemes of llama.cpp's blocks.

Sources: `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref` of ggml-quants.c; activations follow
`quantize_row_q8_0` of its x86 code, which all quantized matmuls on CPU apply to their inputs.
"""

from attrs import evolve

from ms_compress.quantization.scheme import Activations, Scheme

Q8_BLOCKS = Activations(
    num_bits=8,
    group_size=32,
    low=-127,
    high=127,
    scale_dtype="float16",
    by_inverse=True,
)
Q8_0 = Scheme(
    name="gguf.q8_0",
    target="gguf",
    num_bits=8,
    group_size=32,
    groups=(32,),
    low=-127,
    high=127,
    signed_peak=False,
    rounding="away",
    by_inverse=True,
    exact_step=True,
    scale_dtype="float16",
    activations=Q8_BLOCKS,
)
Q4_0 = evolve(
    Q8_0,
    name="gguf.q4_0",
    num_bits=4,
    low=-8,
    high=7,
    signed_peak=True,
    first_peak=True,
    rounding="up",
)
SCHEMES = (Q8_0, Q4_0)
GROUPED: dict[str, Scheme] = {}

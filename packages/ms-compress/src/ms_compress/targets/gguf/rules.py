"""The schemes of llama.cpp's blocks.

Sources: `quantize_row_*_ref` of ggml-quants.c for Q8_0 and Q4_0, and the block layouts of the
others. Activations follow `quantize_row_q8_0` of its x86 code and `quantize_row_q8_K`, which all
quantized matmuls on CPU apply to their inputs.
"""

import re
from typing import Any

from attrs import evolve

from ms_compress.quantization.scheme import Activations, Scheme, SuperBlock

Q8_BLOCKS = Activations(
    num_bits=8,
    group_size=32,
    low=-127,
    high=127,
    scale_dtype="float16",
    by_inverse=True,
)
Q8_K_BLOCKS = evolve(Q8_BLOCKS, group_size=256, scale_dtype="float32", scale_of_inverse=True)
"""Inputs of K-quants: one float32 scale per 256 features."""
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
    format="Q8_0",
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
    format="Q4_0",
)
IQ4_NL = evolve(
    Q4_0,
    name="gguf.iq4_nl",
    low=-127,
    high=113,
    first_peak=False,
    exact_step=False,
    values=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    format="IQ4_NL",
)
MXFP4 = Scheme(
    name="gguf.mxfp4",
    target="gguf",
    num_bits=4,
    type="float",
    group_size=32,
    groups=(32,),
    scale_dtype="float8_e8m0fnu",
    activations=Q8_BLOCKS,
    format="MXFP4",
)


def _k_quant(bits: int, group: int, *, minimums: bool, low: int, high: int) -> Scheme:
    """Return a K-quant: 256 weights in groups whose integer scales are from `low` to `high`."""
    fields: dict[str, Any] = {"low": 0, "high": 2**bits - 1} if minimums else {}
    return Scheme(
        name=f"gguf.q{bits}_k",
        target="gguf",
        num_bits=bits,
        group_size=group,
        groups=(group,),
        symmetric=not minimums,
        signed_peak=not minimums,
        by_inverse=True,
        scale_dtype="float16",
        super_block=SuperBlock(
            size=256, groups=256 // group, low=low, high=high, has_minimums=minimums
        ),
        activations=Q8_K_BLOCKS,
        format=f"Q{bits}_K",
        fallback="gguf.iq4_nl" if bits < 4 else "gguf.q8_0",
        **fields,
    )


Q2_K = _k_quant(2, 16, minimums=True, low=0, high=15)
Q3_K = _k_quant(3, 16, minimums=False, low=-32, high=31)
Q4_K = _k_quant(4, 32, minimums=True, low=0, high=63)
Q5_K = _k_quant(5, 32, minimums=True, low=0, high=63)
Q6_K = _k_quant(6, 16, minimums=False, low=-128, high=127)
Q4_K_M = evolve(Q4_K, name="gguf.q4_k_m", larger="gguf.q6_k")
Q5_K_M = evolve(Q5_K, name="gguf.q5_k_m", larger="gguf.q6_k")
SCHEMES = (Q8_0, Q4_0, Q2_K, Q3_K, Q4_K, Q4_K_M, Q5_K, Q5_K_M, Q6_K, IQ4_NL, MXFP4)
GROUPED: dict[str, Scheme] = {}


def stores_more_bits(name: str, layers: int) -> bool:
    """Return whether llama.cpp's mixtures `_M` store a layer with more bits.

    These are the output matrix, and values and down projections of the first and the last eighth
    of the decoder layers, and of every third layer between them.

    Args:
        name: Hugging Face name of the layer.
        layers: number of decoder layers.
    """
    match = re.search(r"layers\.(\d+)\..*(v_proj|down_proj)$", name)
    if match is None:
        return name == "lm_head"
    layer, eighth = int(match[1]), layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2

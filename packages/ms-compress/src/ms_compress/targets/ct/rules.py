"""The schemes of compressed-tensors; a new one is a value in this file.

Source: `calculate_qparams`, `quantize` and the presets of compressed-tensors.
"""

from typing import Any

from attrs import evolve

from ms_compress.quantization.scheme import Activations, Scheme


def _scheme(name: str, **fields: Any) -> Scheme:
    return Scheme(name=f"ct.{name}", target="ct", eps_for_zeros=True, embeddings=False, **fields)


INT4_G32 = _scheme("int4_g32", num_bits=4, group_size=32)
INT3_G32 = _scheme("int3_g32", num_bits=3, group_size=32)
"""Readable by transformers; we know of no deployment kernel with 3 bits."""
W8A8 = _scheme(
    "w8a8",
    num_bits=8,
    activations=Activations(num_bits=8),
    # `compute_dynamic_scales_and_zp` reduces all dims except the first two.
    input_ndim=3,
)
W4A16_ASYM = _scheme(
    "w4a16_asym_g32", num_bits=4, group_size=32, symmetric=False, format="pack-quantized"
)
W4A8 = _scheme(
    "w4a8_g128",
    num_bits=4,
    group_size=128,
    activations=Activations(num_bits=8),
    input_ndim=3,
    format="pack-quantized",
)
"""Groups of int4 weights and int8 tokens."""
E4M3_TOKENS = Activations(num_bits=8, type="float")
W4AFP8 = _scheme(
    "w4afp8_g128",
    num_bits=4,
    group_size=128,
    activations=E4M3_TOKENS,
    input_ndim=3,
    format="pack-quantized",
)
FP8_DYNAMIC = _scheme(
    "fp8_dynamic",
    num_bits=8,
    type="float",
    activations=E4M3_TOKENS,
    input_ndim=3,
    format="float-quantized",
)
FP8_BLOCK = _scheme(
    "fp8_block",
    num_bits=8,
    type="float",
    strategy="block",
    block_structure=(128, 128),
    activations=Activations(num_bits=8, type="float", group_size=128),
    format="float-quantized",
)
"""The format of DeepSeek-V3."""
MXFP8 = _scheme(
    "mxfp8",
    num_bits=8,
    type="float",
    group_size=32,
    groups=(32,),
    scale_dtype="float8_e8m0fnu",
    activations=Activations(num_bits=8, type="float", group_size=32, scale_dtype="float8_e8m0fnu"),
    format="mxfp8-quantized",
)
MXFP4 = _scheme(
    "mxfp4",
    num_bits=4,
    type="float",
    group_size=32,
    groups=(32,),
    scale_dtype="float8_e8m0fnu",
    activations=Activations(num_bits=4, type="float", group_size=32, scale_dtype="float8_e8m0fnu"),
    format="mxfp4-pack-quantized",
)
NVFP4A16 = _scheme(
    "nvfp4a16",
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    groups=(16,),
    scale_dtype="float8_e4m3fn",
    format="nvfp4-pack-quantized",
)
NVFP4 = evolve(
    NVFP4A16,
    name="ct.nvfp4",
    activations=Activations(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        dynamic="local",
        scale_dtype="float8_e4m3fn",
    ),
)
FP8 = _scheme(
    "fp8",
    num_bits=8,
    type="float",
    strategy="tensor",
    activations=Activations(num_bits=8, type="float", strategy="tensor", dynamic=False),
    format="float-quantized",
)
MXFP8A16 = evolve(MXFP8, name="ct.mxfp8a16", activations=None)
MXFP4A16 = evolve(MXFP4, name="ct.mxfp4a16", activations=None)
SCHEMES = (
    INT4_G32,
    INT3_G32,
    W8A8,
    W4A16_ASYM,
    W4A8,
    W4AFP8,
    FP8,
    FP8_DYNAMIC,
    FP8_BLOCK,
    MXFP8,
    MXFP8A16,
    MXFP4,
    MXFP4A16,
    NVFP4,
    NVFP4A16,
)
GROUPED = {
    "ct.int4": INT4_G32,
    "ct.int3": INT3_G32,
    "ct.w4a16_asym": W4A16_ASYM,
    "ct.w4a8": W4A8,
    "ct.w4afp8": W4AFP8,
}
"""Schemes that can be named with another group size, such as `ct.int4_g64`."""

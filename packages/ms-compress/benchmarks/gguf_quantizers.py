"""Compare the weight errors of our GGUF quantizer with llama.cpp's quantizer.

python packages/ms-compress/benchmarks/gguf_quantizers.py LIBRARY

LIBRARY is a shared library with `ggml_quantize_chunk`: libggml-base.so of a build of llama.cpp or
of llama-cpp-python, or the extension module of the xllamacpp wheel. Each type rounds the same
matrices, without and with the importance of each feature; both results are read by the gguf
library. The last check computes products of K-quants with llama.cpp's own kernels, if the library
has them, from inputs that we round.
"""

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import gguf
import numpy as np
import torch
from torch import Tensor

from ms_compress.quantization.rounding import (
    best_factor,
    quantize_weight,
    round_activations,
    round_weight,
)
from ms_compress.targets.gguf.blocks import pack
from ms_compress.targets.gguf.rules import Q8_K_BLOCKS
from ms_compress.targets.rules import scheme

ROWS, FEATURES = 256, 1024
TYPES = ("Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
SUM_BOUND = 8 * FEATURES**0.5 * 2**-24


def llama_quantizer(library: ctypes.CDLL) -> Callable[[Tensor, str, Tensor | None], Tensor]:
    """Return a function of (weight, type, importance) that rounds a weight as llama.cpp does."""
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    integers, pointer = [ctypes.c_int64] * 3, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, *integers, pointer]

    def rounded(weight: Tensor, name: str, importance: Tensor | None) -> Tensor:
        quant_type = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[quant_type]
        rows, features = weight.shape
        blocks = np.zeros((rows, features // block * size), np.uint8)
        costs = None if importance is None else importance.numpy().ctypes.data
        source = weight.contiguous().numpy()
        function(int(quant_type), source.ctypes.data, blocks.ctypes.data, 0, rows, features, costs)
        return torch.from_numpy(gguf.dequantize(blocks, quant_type).copy())

    return rounded


def kernel_error(library: ctypes.CDLL, name: str, weight: Tensor, x: Tensor) -> float:
    """Return the largest difference of llama.cpp's products from ours, in bounds of their sums."""
    library.ggml_cpu_init()
    quantized = quantize_weight(weight, scheme(f"gguf.{name.lower()}"))
    blocks = pack(quantized)
    inputs = np.zeros((len(x), FEATURES // 256 * 292), np.uint8)  # Q8_K: 4 + 256 + 32 bytes
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    round_inputs = library.quantize_row_q8_K
    round_inputs.argtypes, round_inputs.restype = [pointer, pointer, ctypes.c_int64], None
    multiply = getattr(library, f"ggml_vec_dot_{name.lower().replace('_k', '_K')}_q8_K")
    multiply.argtypes = [
        *(ctypes.c_int, pointer, size, pointer, size),
        *(pointer, size, ctypes.c_int),
    ]
    multiply.restype = None
    out = np.zeros((len(x), len(weight)), np.float32)
    for i, row in enumerate(x.numpy()):
        round_inputs(row.ctypes.data, inputs[i].ctypes.data, FEATURES)
        for j in range(len(weight)):
            result = out[i, j:].ctypes.data
            multiply(FEATURES, result, 0, blocks[j].ctypes.data, 0, inputs[i].ctypes.data, 0, 1)
    rounded, dequantized = round_activations(x, Q8_K_BLOCKS).double(), quantized.weight().double()
    bound = SUM_BOUND * (rounded.abs() @ dequantized.abs().T)
    return float(((torch.from_numpy(out) - rounded @ dequantized.T).abs() / bound).max())


def main() -> None:
    """Print one row per type and matrix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    library = ctypes.CDLL(str(parser.parse_args().library.resolve()))
    theirs = llama_quantizer(library)
    torch.manual_seed(0)
    normal = torch.randn(ROWS, FEATURES) * 0.02
    heavy = torch.randn(ROWS, FEATURES) * 0.02 * torch.randn(ROWS, FEATURES).abs().exp()
    importance = torch.randn(FEATURES).square() * torch.linspace(0.1, 4, FEATURES)
    print("| Type | normal | normal, importance | heavy tails | heavy tails, importance | s |")
    print("|---|---|---|---|---|---|")
    for name in TYPES:
        quant_scheme, columns, seconds = scheme(f"gguf.{name.lower()}"), [], 0.0
        for weight in (normal, heavy):
            for costs in (None, importance):
                begin = perf_counter()
                factor = best_factor(weight, quant_scheme, costs)
                seconds += perf_counter() - begin
                ours = round_weight(weight, quant_scheme, factor)
                scale = torch.ones(FEATURES) if costs is None else costs
                size = (weight.square() @ scale).sum()
                errors = [
                    float((((result - weight).square() @ scale).sum() / size).sqrt())
                    for result in (ours, theirs(weight, name, costs))
                ]
                columns.append(f"{errors[0]:.4f}, {errors[1]:.4f}")
        print(f"| {name} | {' | '.join(columns)} | {seconds / 4:.2f} |", flush=True)
    if hasattr(library, "ggml_vec_dot_q4_K_q8_K"):
        x = torch.randn(16, FEATURES)
        for name in (name for name in TYPES if name.endswith("_K")):
            print(f"{name}: products differ by {kernel_error(library, name, normal[:32], x):.2g}")


if __name__ == "__main__":
    main()

"""Check the Triton attention kernels against float64, in fresh processes and under many settings.

    python benchmarks/attention_gpu_check.py            # on a GPU
    TRITON_INTERPRET=1 python benchmarks/attention_gpu_check.py --device cpu --dtypes float32

Each dtype runs in a fresh process, so that its first launch really is the first one. The
contract's example runs through the registered operator and through direct calls of the kernel,
with and without documents and sinks, with other head widths, and under other launch settings.
Every line gives the largest error as a multiple of the tolerance; a wrong result is followed by
its first wrong rows. To distinguish a compiler error from one of ours, repeat the run with another
assembler: TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas. Exit code 0 if everything is within
tolerance, 1 otherwise, 2 without an accelerator.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from ms_kernels.checking import compare
from ms_kernels.core.launches import key_of, trying
from ms_kernels.operators.attention import triton as kernels
from ms_kernels.operators.attention.contract import CONTRACT

SETTINGS: tuple[Mapping[str, int], ...] = (
    {},
    {"num_stages": 1},
    {"num_stages": 3},
    {"num_warps": 8},
    {"BM": 64},
    {"BN": 32},
    {"BM": 64, "BN": 32, "num_stages": 1},
    {"BM": 16, "BN": 16, "num_stages": 1},
)
"""Changes to the default launch settings of the forward and backward kernels."""
SIZES: tuple[Mapping[str, int], ...] = (
    *({"D": width, "Dv": width} for width in (32, 64, 128)),
    {"D": 24, "Dv": 8},
    {"D": 32, "Dv": 16},
    {"D": 8, "Dv": 24},
    {"D": 192, "Dv": 128},
)
"""Changes to the sizes of the example."""


def main() -> int:
    """Run every dtype in its own process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default=None, help="default: this machine's accelerator")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device is None and not torch.accelerator.is_available():
        print("attention_gpu_check.py: no accelerator is available; use --device cpu")
        return 2
    device = torch.device(options.device or torch.accelerator.current_accelerator())
    if options.one:
        return check(device, getattr(torch, options.dtypes[0]), options.repeats)
    shared = ["--one", "--device", str(device), "--repeats", str(options.repeats)]
    codes = [
        subprocess.call([sys.executable, __file__, *shared, "--dtypes", dtype])
        for dtype in options.dtypes
    ]
    return int(any(codes))  # a crash ends with a negative code


def check(device: torch.device, dtype: torch.dtype, repeats: int) -> int:
    """Run every case in one dtype; return 1 if any is outside its tolerance."""
    print(f"\n{dtype} on {device}, torch {torch.__version__}", flush=True)
    wrong = 0
    for case, sizes, without, change in cases():
        tensors = CONTRACT.draw(dict(sizes), dtype=dtype, device=device)
        inputs = [None if name in without else tensor for name, tensor in tensors.items()]
        ratios_of_runs = []
        with ExitStack() as stack:
            # One override is active at a time, so gradients are checked under defaults only.
            if change:
                used = kernels.FORWARD.values(key_of(tensors["q"]), tensors["q"].shape[-1])
                stack.enter_context(trying(kernels.FORWARD, {**used, **change}))
            for repeat in range(repeats):
                run = kernels.IMPLEMENTATION.run
                ratios = dict(compare(CONTRACT, run, inputs, (True, None, None)))
                ratios_of_runs.append(ratios)
                direct = forward_error(inputs)
                ratios["direct call"] = direct[0]
                if repeat == 0 and direct[1]:
                    print(f"    wrong rows (batch, query, head): {direct[1]}")
        max_ratios = {
            name: max(by_name[name] for by_name in ratios_of_runs) for name in ratios_of_runs[0]
        }
        bad = not all(ratio <= 1 for ratio in max_ratios.values())
        wrong += bad
        figures = ", ".join(f"{name} {ratio:.3g}" for name, ratio in max_ratios.items())
        print(f"{'WRONG' if bad else 'ok   '} {case}: {figures}", flush=True)
        if bad:
            print(
                f"    by run: {[round(by_name['result'], 2) for by_name in ratios_of_runs]}",
                flush=True,
            )
    print(f"{dtype}: {wrong} cases wrong", flush=True)
    return int(wrong > 0)


def cases() -> Iterator[tuple[str, Mapping[str, int], tuple[str, ...], Mapping[str, int]]]:
    """Yield a title, sizes, arguments to leave out, and changes to the launch settings."""
    yield "example", {}, (), {}
    for without in (("documents",), ("sinks",), ("documents", "sinks")):
        yield f"example without {' and '.join(without)}", {}, without, {}
    for sizes in SIZES:
        yield f"example with {dict(sizes)}", sizes, (), {}
    for change in SETTINGS[1:]:
        yield f"example, forward launched with {dict(change)}", {}, (), change


def forward_error(inputs: list[Tensor | None]) -> tuple[float, list[tuple[int, ...]]]:
    """Return the error of a direct call relative to the tolerance, and the first wrong rows."""
    result, _ = kernels._forward(*inputs, True, None, None)  # type: ignore[arg-type]
    float64_inputs = [
        tensor.double() if tensor is not None and tensor.is_floating_point() else tensor
        for tensor in inputs
    ]
    expected = CONTRACT.reference(*float64_inputs, True, None, None)
    tolerance = CONTRACT.tolerance.results[result.dtype]
    ratio = (result.double() - expected).abs() / (
        tolerance.relative * expected.abs() + tolerance.absolute
    )
    rows = (~(ratio <= 1)).any(-1).nonzero()
    return float(ratio.max()), [tuple(row.tolist()) for row in rows[:8]]


if __name__ == "__main__":
    sys.exit(main())

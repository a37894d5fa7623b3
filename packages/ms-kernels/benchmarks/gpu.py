"""Everything that exists, on this machine's accelerator: proofs, times, memory, in one table.

python benchmarks/gpu.py [--out table.md]     # needs ms-kernels on the path, nothing else

Times are medians over repeated launches between two events. Bandwidth and FLOP rates divide the
contract's least work by them, beside a copy and a matrix product measured here.
"""

import argparse
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import ms_kernels
from ms_kernels.check import check
from ms_kernels.dispatch import CONTRACTS, IMPLEMENTATIONS, describe_call
from ms_kernels.registry import obstacle_to

SIZES = {
    "rms_norm": {"...": 8192, "H": 4096},
    "rotary": {"B": 4, "S": 2048, "Hq": 32, "Hk": 8, "D": 128, "R/2": 64},
    "swiglu": {"...": 8192, "I": 14336},
    "attention": {"B": 1, "Sq": 2048, "Sk": 2048, "Hq": 32, "Hk": 8, "D": 128},
    "cross_entropy": {"...": 8192, "V": 32768},
    "linear_cross_entropy": {"...": 8192, "H": 1024, "V": 32768},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table here")
    options = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        print("gpu.py: there is no accelerator here, or torch was built without one")
        return 2
    lines = [
        "# ms-kernels on an accelerator",
        "",
        f"{_name(device)}; torch {torch.__version__}, Python {platform.python_version()}, "
        f"ms-kernels {ms_kernels.__version__}",
        "",
    ]
    held = prove(device, lines)
    measure(device, lines)
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if held else 1


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return module.get_device_name() if hasattr(module, "get_device_name") else str(device)


def prove(device: torch.device, lines: list[str]) -> bool:
    """Check every backend in three dtypes, and note what does not hold."""
    held = True
    lines += ["## Proofs", "", "| dtype | hold | fail |", "|---|---|---|"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        findings = [each for each in check(device=device, dtype=dtype) if not each.reason]
        wrong = [each for each in findings if not each.holds]
        told = "; ".join(
            f"{each.operator} {each.backend} {each.options} {each.part}: {each.share:.3g}"
            for each in wrong
        )
        lines.append(f"| {dtype} | {len(findings) - len(wrong)} | {told or '0'} |")
        held &= not wrong and bool(findings)
    return held


def measure(device: torch.device, lines: list[str]) -> None:
    """Time every implementation that takes the call, with its memory beyond the inputs."""
    copy_rate, product_rate = _ceilings(device)
    lines += [
        "",
        "## Times, bfloat16",
        "",
        f"Copy {copy_rate / 1e9:.0f} GB/s; matrix product {product_rate / 1e12:.0f} TFLOP/s.",
        "",
        "| operator | backend | pass | ms | GB/s | TFLOP/s | extra MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in IMPLEMENTATIONS:
        contract = CONTRACTS[each.operator]
        drawn = contract.draw(SIZES[each.operator], dtype=torch.bfloat16, device=device)
        spare = [argument.name for argument in contract.arguments if argument.optional]
        inputs = tuple(None if name in spare else tensor for name, tensor in drawn.items())
        values = tuple(option.default for option in contract.options)
        call = describe_call(contract, inputs, values)
        if obstacle_to(each, call) is not None:
            continue
        dims = contract.bind(call)
        forward, backward = contract.forward(dims, 2), contract.backward(dims, 2)
        both = (forward.size_bytes + backward.size_bytes, forward.flops + backward.flops)
        for name, work, step in (
            ("forward", tuple(forward), _pass(contract, each.run, inputs, values, False)),
            ("forward and backward", both, _pass(contract, each.run, inputs, values, True)),
        ):
            extra = _extra_mib(step)
            took = _seconds(device, step)
            lines.append(
                f"| {each.operator} | {each.backend} | {name} | {1e3 * took:.3f} "
                f"| {work[0] / took / 1e9:.0f} | {work[1] / took / 1e12:.1f} | {extra:.0f} |"
            )


def _ceilings(device: torch.device) -> tuple[float, float]:
    """Return the bytes a second of a copy and the FLOPs a second of a bfloat16 product."""
    block = torch.empty(2**28, dtype=torch.uint8, device=device)
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    copy_s = _seconds(device, block.clone)
    return 2 * block.numel() / copy_s, 2 * 4096**3 / _seconds(device, lambda: square @ square)


def _pass(contract, run, inputs, options, backward: bool) -> Callable[[], object]:  # type: ignore[no-untyped-def]
    """Return a function that runs an implementation once."""
    leaves = [
        None if each is None else each.detach().requires_grad_(backward and argument.differentiable)
        for argument, each in zip(contract.arguments, inputs, strict=True)
    ]
    wanted = [each for each in leaves if each is not None and each.requires_grad]

    def step() -> object:
        result = run(*leaves, *options)
        if not backward:
            return result
        result = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(result, wanted, [torch.ones_like(each) for each in result])

    return step


def _extra_mib(step: Callable[[], object]) -> float:
    """Return the peak memory of one pass beyond what was there before."""
    step()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    step()
    return (torch.accelerator.max_memory_allocated() - before) / 2**20


def _seconds(device: torch.device, step: Callable[[], object]) -> float:
    """Return the median time of one pass, each timed between two events."""
    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    took: list[float] = []
    spent = 0.0
    while len(took) < 5 or (spent < 1.0 and len(took) < 100):
        start = torch.Event(device=device, enable_timing=True)
        end = torch.Event(device=device, enable_timing=True)
        start.record()
        keep: Tensor | object = step()
        end.record()
        torch.accelerator.synchronize()
        del keep
        took.append(start.elapsed_time(end) / 1e3)
        spent += took[-1]
    return statistics.median(took)


if __name__ == "__main__":
    sys.exit(main())

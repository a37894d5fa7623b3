"""Benchmark everything on this machine's accelerator: checks, times and memory, in one table.

python benchmarks/gpu.py [--out table.md]     # needs only ms-kernels on the path
python benchmarks/gpu.py --dry                # tiny sizes on the CPU, to test the script

Times are medians over rounds in which all methods alternate, between two events. Bandwidth and
FLOP rates divide the contract's least work by these times; a copy and a matrix product are
measured for comparison. Each section (`accelerator/`) is written when it ends; a failing section
reports its error, and the next one runs. A method that does not run has a row with its error.
Exit code 0 if all checks pass and nothing of ours fails, 1 otherwise, 2 without an accelerator.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

if "--dry" in sys.argv:  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from accelerator import attention, block, ceilings, library, loss, memory_bound, others, proofs
from accelerator.report import Report

import ms_kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu")
    if not options.dry:
        if not torch.accelerator.is_available():
            print("gpu.py: no accelerator is available, or torch was built without one")
            return 2
        device = torch.device(torch.accelerator.current_accelerator().type, 0)
    report = Report(device=device, small=options.dry, out=options.out)
    report.add("# ms-kernels on an accelerator", "", _versions(device))
    if options.dry:
        report.add("", "A dry run: tiny sizes, interpreted kernels. Its times mean nothing.")
    report.section("Proofs", proofs.prove)
    rates = report.section("Ceilings", ceilings.measure)
    for name, body in (
        ("Ahead-of-time library", library.launch),
        ("Memory-bound operators", lambda report: memory_bound.measure(report, rates)),
        ("Linear cross-entropy", lambda report: loss.measure(report, rates)),
        ("Attention compared with each of torch's kernels", attention.plain),
        ("Training a Llama block", block.measure),
        ("Other operators", others.measure),
        ("Attention that only our kernel supports", attention.masked),
    ):
        report.section(name, body)
    report.add("", f"{time.monotonic() - report.start:.0f} s in all; all passed: {report.passed}")
    return 0 if report.passed else 1


def _versions(device: torch.device) -> str:
    module = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else str(device)
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    versions.append(f"ms-kernels {ms_kernels.__version__}")
    for package in ("triton", "liger-kernel"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{time.strftime('%Y-%m-%d')}, {name}; {', '.join(versions)}"


if __name__ == "__main__":
    sys.exit(main())

"""Everything that exists, on this machine's accelerator: proofs, times, memory, in one table.

python benchmarks/gpu.py [--out table.md]     # needs ms-kernels on the path, nothing else
python benchmarks/gpu.py --dry                # tiny sizes on the CPU: does the script work?

Times are medians of rounds in which all ways have their turn, between two events. Bandwidth and
FLOP rates divide the contract's least work by them, beside a copy and a matrix product measured
here. Each section (`accelerator/`) is written as it ends; one that fails says why, and the next one
runs. A way that does not run has a row with its error. Exit code 0 when all proofs hold and nothing
of ours failed, 1 otherwise, 2 where there is no accelerator.
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
            print("gpu.py: there is no accelerator here, or torch was built without one")
            return 2
        device = torch.device(torch.accelerator.current_accelerator().type, 0)
    report = Report(device=device, small=options.dry, out=options.out)
    report.add("# ms-kernels on an accelerator", "", _versions(device))
    if options.dry:
        report.add("", "A dry run: tiny sizes, kernels interpreted. Its times mean nothing.")
    report.section("Proofs", proofs.prove)
    rates = report.section("Ceilings", ceilings.measure)
    for name, body in (
        ("The library built ahead of time", library.launch),
        ("Operators bound by memory", lambda each: memory_bound.measure(each, rates)),
        ("Linear cross-entropy", lambda each: loss.measure(each, rates)),
        ("Attention, beside each of torch's kernels", attention.plain),
        ("A Llama block, trained", block.measure),
        ("Other operators", others.measure),
        ("Where our own attention alone can go", attention.masked),
    ):
        report.section(name, body)
    report.add("", f"{time.monotonic() - report.started:.0f} s in all; all held: {report.held}")
    return 0 if report.held else 1


def _versions(device: torch.device) -> str:
    module = torch.get_device_module(device)
    name = module.get_device_name() if hasattr(module, "get_device_name") else str(device)
    known = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    known.append(f"ms-kernels {ms_kernels.__version__}")
    for package in ("triton", "liger-kernel"):
        try:
            known.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            known.append(f"no {package}")
    return f"{time.strftime('%Y-%m-%d')}, {name}; {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())

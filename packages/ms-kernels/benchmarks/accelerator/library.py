"""The ahead-of-time library for this chip, launched from Python and from a C program."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from accelerator.report import Report
from ms_kernels.aot import TARGETS, Library, load
from ms_kernels.core.chips import chip_of
from ms_kernels.operators import CONTRACTS

__all__ = ["launch"]

SOURCE = Path(__file__).with_name("launch.c")

WITHOUT_DRIVER = 80
"""Exit code of the C program when the first launch finds no driver."""


def launch(report: Report) -> None:
    """Build two kernels and run them; a dry run only builds and checks that C gets an error."""
    chip = "sm_90" if report.small else chip_of(report.device)
    if chip not in TARGETS or importlib.util.find_spec("triton") is None:
        report.add("", f"not tried: no target {chip}, or triton is not installed")
        return
    if shutil.which("cc") is None:
        report.passed = False
        report.add("", "not tried: no C compiler")
        return
    with tempfile.TemporaryDirectory() as folder:
        library_folder = _build(chip, Path(folder) / "lib")
        if not report.small:
            _from_python(report, load(library_folder))
        elif len(load(library_folder).manifest.kernels) != 2:
            report.passed = False
        if TARGETS[chip].backend == "cuda":
            _from_c(report, library_folder, Path(folder))


def _build(chip: str, out: Path) -> Path:
    """Build as a user would; the compiler does not work in a process that interprets kernels."""
    command = [sys.executable, "-m", "ms_kernels", "build", "--target", chip, "--out", str(out)]
    for only in ("rms_norm_forward_fp32_4096", "scale_cast_fp32"):
        command += ["--only", only]
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(process.stderr.strip() or f"build ended with {process.returncode}")
    return out / chip


def _from_c(report: Report, library_folder: Path, folder: Path) -> None:
    program = folder / "main"
    command = [
        "cc",
        str(SOURCE),
        "-I",
        str(library_folder),
        str(library_folder / "libms_kernels.so"),
    ]
    command += [f"-Wl,-rpath,{library_folder}", "-ldl", "-lm", "-o", str(program)]
    subprocess.run(command, check=True)
    process = subprocess.run([program], capture_output=True, text=True, timeout=60)
    report.passed &= process.returncode == (WITHOUT_DRIVER if report.small else 0)
    report.add("", f"From C: exit code {process.returncode}, {process.stdout.strip()}")


def _from_python(report: Report, library: Library) -> None:
    x = torch.randn(8, 4096, device=report.device)
    weight, y = torch.randn(4096, device=report.device), torch.empty_like(x)
    scale = torch.empty(8, device=report.device)
    names = {"X": x, "RESIDUAL": x, "W": weight, "Y": y, "SUM": y, "SCALE": scale}
    stream = torch.accelerator.current_stream(report.device)
    library.launch(
        "rms_norm_forward_fp32_4096",
        stream=getattr(stream, "cuda_stream", None) or getattr(stream, "native_handle", 0) or 0,
        **{name: tensor.data_ptr() for name, tensor in names.items()},
        rows=8, width=4096, x_stride=4096, residual_stride=4096, eps=1e-6,
    )  # fmt: skip
    torch.accelerator.synchronize()
    error = (y - CONTRACTS["rms_norm"].reference(x, weight, 1e-6)).abs().max().item()
    report.passed &= error < 1e-4
    report.add("", f"From Python with ctypes: largest error {error:.3g}")

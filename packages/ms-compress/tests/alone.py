"""Test of the installed wheel with only its required dependencies; run by `nox -s alone`."""

import importlib.util
import subprocess
import sys

import torch
from torch import nn

import ms_compress
from ms_compress import qat


def check(holds: bool, fact: str) -> None:
    """Exit with status 1 if the fact does not hold."""
    if not holds:
        sys.exit(f"does not hold: {fact}")


def main() -> None:
    """Compute a layer as its target does, and run the command."""
    for sibling in ("ms_data", "ms_kernels", "ms_parallel", "ms_align", "ms_profile"):
        check(importlib.util.find_spec(sibling) is None, f"{sibling} is absent here")
    layer = nn.Sequential(nn.Linear(32, 1, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(torch.arange(-16.0, 16.0))
    qat(layer, "gguf.q4_0", activations=False)
    # The scale is -16 / -8 = 2, and codes go from -8 to 7: 15 becomes 14.
    last_output = layer(torch.eye(32)[31:])
    check(last_output.item() == 14.0, "the last weight of -16 ... 15 is 14 in four bits")
    command = [sys.executable, "-I", "-m", "ms_compress", "--help"]
    check(subprocess.run(command, capture_output=True).returncode == 0, "the command answers")
    print(f"ms-compress {ms_compress.__version__} works alone")


if __name__ == "__main__":
    main()

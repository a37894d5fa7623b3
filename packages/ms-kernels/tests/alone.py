"""Test of the installed wheel with only its required dependencies; run by `nox -s alone`."""

import importlib.util
import subprocess
import sys

import torch

import ms_kernels
from ms_kernels import attention, linear_cross_entropy, rms_norm, rotary, swiglu, use_backend
from ms_kernels.core.tables import chips


def check(holds: bool, fact: str) -> None:
    """Exit with status 1 if the fact does not hold."""
    if not holds:
        sys.exit(f"does not hold: {fact}")


def main() -> None:
    """Run every operator once, and the command."""
    for sibling in ("ms_data", "ms_parallel", "ms_align", "ms_compress", "ms_profile"):
        check(importlib.util.find_spec(sibling) is None, f"{sibling} is absent here")
    torch.manual_seed(0)
    hidden = torch.randn(2, 6, 16, requires_grad=True)
    q, k, v = (torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    angles = torch.arange(6).float()[None, :, None] / torch.tensor([1.0, 10.0, 100.0, 1000.0])
    with use_backend("reference"):
        q, k = rotary(q, k, angles.cos(), angles.sin())
        out = attention(q, k, v)
        normed = rms_norm(hidden, torch.ones(16))
        loss = linear_cross_entropy(
            swiglu(normed, normed), torch.randn(32, 16), torch.randint(32, (2, 6))
        )
    loss.backward()
    check(out.shape == (2, 6, 4, 8), "attention keeps its queries' shape")
    check(hidden.grad is not None and bool(hidden.grad.isfinite().all()), "gradients are finite")
    choice = ms_kernels.explain("rms_norm", hidden, torch.ones(16))
    check(len(choice.verdicts) > 0, "explain says why")
    check("cpu-avx512" in chips(), "tuning tables are in the wheel")
    tokens, experts = torch.randn(5, 8), torch.randint(3, (5, 2))
    rows, _, row_index = ms_kernels.permute_tokens(tokens, experts, count=3)
    restored = ms_kernels.unpermute_tokens(rows, row_index, torch.full((5, 2), 0.5))
    check(torch.allclose(restored, tokens), "tokens come back from their experts")
    command = [sys.executable, "-I", "-m", "ms_kernels", "list"]
    check(subprocess.run(command, capture_output=True).returncode == 0, "ms-kernels list works")
    print(f"ms-kernels {ms_kernels.__version__} works alone")


if __name__ == "__main__":
    main()

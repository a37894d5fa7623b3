"""Attention: default, Triton and torch kernels, and masks that torch does not support."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import ms_kernels
from accelerator.report import Report
from accelerator.ways import is_peer, ours
from ms_kernels.operators import CONTRACTS

__all__ = ["masked", "plain"]

TORCH_KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
"""Torch kernels that the fastest is chosen from."""


def plain(report: Report) -> None:
    """Time causal attention, forward and with gradients."""
    shapes = [(1, 16, 4, 2, 16)] if report.small else [
        (4, 4096, 32, 8, 128), (1, 16384, 32, 8, 128), (8, 2048, 32, 32, 64),
    ]  # fmt: skip
    args = (None, None, *CONTRACTS["attention"].defaults)  # no documents, no sinks
    report.table("B S Hq Hk D", "pass", "method", "ms", "TFLOP/s", "of torch's best")
    for batch, length, heads, groups, width in shapes:
        q, k, v = _random_qkv(report, batch, length, (heads, groups, groups), width)
        steps: dict[str, Callable[[], Tensor]] = {
            "ms_kernels, as chosen": lambda q=q, k=k, v=v: ms_kernels.attention(q, k, v)
        }
        for impl in ours(report, "attention"):
            if impl.backend == "triton":
                steps["ms_kernels, triton"] = lambda q=q, k=k, v=v, run=impl.run: run(
                    q, k, v, *args
                )
        for name in TORCH_KERNELS:
            kernel = getattr(SDPBackend, name)
            steps[name] = lambda q=q, k=k, v=v, kernel=kernel: _sdpa(kernel, q, k, v)
        flops = 2 * batch * heads * length * length * width
        for pass_name, both in (("forward", False), ("forward and backward", True)):
            methods = {
                name: _both_passes(run, (q, k, v)) if both else run for name, run in steps.items()
            }
            seconds_of, failed = report.times(methods, spend_s=0.3, may_fail=is_peer)
            best = min(
                (seconds_of[name] for name in TORCH_KERNELS if name in seconds_of),
                default=float("nan"),
            )
            shape = f"{batch} {length} {heads} {groups} {width}"
            for name, seconds in seconds_of.items():
                rate = flops * (3.5 if both else 1) / seconds / 1e12
                cells = (f"{1e3 * seconds:.3f}", f"{rate:.3g}", f"{best / seconds:.0%}")
                report.row(shape, pass_name, name, *cells)
            for name, reason in failed.items():
                report.row(shape, pass_name, name, "failed", reason, "")


def masked(report: Report) -> None:
    """Time windows and documents, which torch's kernels do not support, and full attention."""
    batch, length, heads, groups, width = (
        (1, 64, 4, 2, 16) if report.small else (1, 16384, 32, 8, 128)
    )
    q, k, v = _random_qkv(report, batch, length, (heads, groups, groups), width)
    documents = torch.arange(length, device=report.device).div(length // 8, rounding_mode="floor")
    documents = documents.int().expand(batch, length).contiguous()
    methods = {
        "causal": lambda: ms_kernels.attention(q, k, v),
        f"window {length // 16}": lambda: ms_kernels.attention(q, k, v, window=length // 16),
        "8 documents": lambda: ms_kernels.attention(q, k, v, documents=documents),
    }
    seconds_of, failed = report.times(
        {name: _both_passes(run, (q, k, v)) for name, run in methods.items()}, spend_s=0.3
    )
    report.table("mask", "forward and backward, ms")
    for name, seconds in seconds_of.items():
        report.row(name, f"{1e3 * seconds:.3f}")
    for name, reason in failed.items():
        report.row(name, f"failed: {reason}")


def _random_qkv(
    report: Report, batch: int, length: int, heads: tuple[int, ...], width: int
) -> tuple[Tensor, ...]:
    dtype = torch.float32 if report.small else torch.bfloat16
    return tuple(
        torch.randn(batch, length, count, width, device=report.device, dtype=dtype).requires_grad_()
        for count in heads
    )


def _sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel):
        heads = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=grouped)


def _both_passes(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    def step() -> object:
        result = run()
        return torch.autograd.grad(result, leaves, torch.ones_like(result))

    return step

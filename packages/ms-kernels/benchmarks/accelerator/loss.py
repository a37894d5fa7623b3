"""linear_cross_entropy against its lower bound, torch and Liger: time, memory and loss."""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import ms_kernels
from accelerator.ceilings import Ceilings
from accelerator.report import Report
from accelerator.ways import is_peer, ours
from ms_kernels.operators import CONTRACTS

__all__ = ["measure"]


def measure(report: Report, ceilings: Ceilings) -> None:
    """Time forward and backward; the lower bound is three matrix products."""
    rows, width, classes = (8, 32, 256) if report.small else (8192, 4096, 128256)
    dtype = torch.float32 if report.small else torch.bfloat16
    hidden = torch.randn(rows, width, device=report.device, dtype=dtype).requires_grad_()
    weight = torch.randn(classes, width, device=report.device, dtype=dtype) * width**-0.5
    weight.requires_grad_()
    targets = torch.randint(classes, (rows,), device=report.device)
    floor = 6 * rows * width * classes / ceilings.product_rate
    report.add("", f"{rows} x {width} x {classes}, {dtype}; three products: {1e3 * floor:.2f} ms.")
    losses = _methods(report, hidden, weight, targets)
    expected = _float32_loss(hidden, weight, targets)
    report.table("method", "ms", "times floor", "extra MiB", "loss", "minus the float32 loss")
    steps = {name: _both_passes(loss, (hidden, weight)) for name, loss in losses.items()}
    seconds_of, failed = report.times(steps, spend_s=1.0, rounds=3, may_fail=is_peer)
    for name, seconds in seconds_of.items():
        value = losses[name]().detach().item()
        extra, error = f"{report.extra_mib(steps[name]):.0f}", f"{value - expected:+.5f}"
        cells = (f"{1e3 * seconds:.2f}", f"{seconds / floor:.2f}", extra, f"{value:.5f}", error)
        report.row(name, *cells)
    for name, reason in failed.items():
        report.row(name, "failed", reason, "", "", "")


def _methods(
    report: Report, hidden: Tensor, weight: Tensor, targets: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Return methods of computing the same loss, by name."""

    def plain() -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), targets)

    losses: dict[str, Callable[[], Tensor]] = {
        "ms_kernels": lambda: ms_kernels.linear_cross_entropy(hidden, weight, targets),
        "plain torch": plain,
    }
    for impl in ours(report, "linear_cross_entropy") if report.small else ():
        losses[f"ms_kernels, {impl.backend}"] = lambda run=impl.run: run(
            hidden, weight, targets, *CONTRACTS["linear_cross_entropy"].defaults
        )
    if hasattr(F, "linear_cross_entropy"):
        losses["F.linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, targets)
    if not report.small:
        losses["torch.compile"] = torch.compile(plain)
        if importlib.util.find_spec("liger_kernel") is not None:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            losses["Liger"] = lambda: liger_fused_linear_cross_entropy(hidden, weight, targets)
    return losses


def _float32_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> float:
    """Return the loss from float32 logits, 1,024 rows at a time."""
    with torch.no_grad():
        parts = [
            F.cross_entropy(rows.float() @ weight.float().T, row_targets, reduction="sum").double()
            for rows, row_targets in zip(hidden.split(1024), targets.split(1024), strict=True)
        ]
    return float(sum(parts)) / len(targets)


def _both_passes(
    loss: Callable[[], Tensor], leaves: tuple[Tensor, ...]
) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(loss(), leaves)

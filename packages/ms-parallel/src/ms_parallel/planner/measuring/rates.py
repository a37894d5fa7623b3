"""Times matrix products and passes over memory on one device."""

import time
from collections.abc import Callable

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL, LARGE = 256, 8192
"""Rows of the square matrices: of the first product, and the most."""
LEAST_S, PATIENCE_S = 0.03, 0.5
"""Seconds that a product takes at least, and in which a dtype's products are repeated."""
ROUNDS = 5
CPU_BYTES, DEVICE_BYTES = 128 << 20, 1 << 30
"""Bytes that a pass goes over: more than any cache holds."""


def product_tflops(dtype: torch.dtype, device: torch.device) -> float | None:
    """Measure products of square matrices, in 10¹² operations a second; None without any.

    The side grows until a product takes long enough to be timed; a product of n rows counts 2 n³.

    Args:
        dtype: of the matrices.
        device: that computes.
    """
    side = SMALL
    while True:
        try:
            work = _product(side, dtype, device)
            took = _shortest(work, device, 2)
        except (RuntimeError, NotImplementedError):  # torch has none for this dtype and device
            return None
        if took >= LEAST_S or side >= LARGE:
            break
        side *= 2
    rounds = max(2, min(ROUNDS, int(PATIENCE_S / max(took, 1e-9))))
    return 2 * side**3 / _shortest(work, device, rounds) / 1e12


def memory_gb_per_s(device: torch.device) -> float:
    """Measure what a device reads and writes of its memory, in 10⁹ bytes a second."""
    size = CPU_BYTES if device.type == "cpu" else DEVICE_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _shortest(lambda: torch.neg(source, out=target), device, ROUNDS) / 1e9


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    target = torch.empty(side, side, dtype=dtype, device=device)
    return lambda: torch.mm(left, right, out=target)


def _shortest(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Time the shortest of some rounds in seconds, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])

"""Initial adapters that peft subtracts from the weights before training: PiSSA and OLoRA.

Both compute initial matrices B₀ and A₀ from the weight W and train on W - s·B₀·A₀. The adapter's
folder contains neither, so they are recomputed from W when it is loaded.
Shapes: r rank, I inputs, O outputs; weights of experts have a leading dim.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def principal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A₀ and B₀ from the r largest singular values of W: PiSSA (Meng et al., 2024)."""
    u, singular_values, vh = torch.linalg.svd(weight, full_matrices=False)
    # s · B₀·A₀ must equal the rank-r approximation, so each factor gets √(value / s).
    root = (singular_values[..., :rank] / scale).sqrt()
    return root[..., :, None] * vh[..., :rank, :], u[..., :rank] * root[..., None, :]


def orthonormal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return B₀ = r columns of Q and A₀ = r rows of R, with W = Q·R: OLoRA (Büyükakyüz, 2024)."""
    q, r = torch.linalg.qr(weight)
    return r[..., :rank, :], q[..., :rank]


INITIAL_ADAPTERS: Mapping[str, Callable[[Tensor, int, float], tuple[Tensor, Tensor]]] = {
    "pissa": principal,
    "olora": orthonormal,
}
"""By peft's name: function of a weight (O, I) float32, rank and scale to A₀ (r, I), B₀ (O, r)."""

"""What peft takes out of a layer's weight before it trains a PiSSA or an OLoRA adapter.

Both begin with matrices B₀ and A₀ that are parts of the weight W itself, and train on W - s·B₀·A₀.
The folder holds neither W - s·B₀·A₀ nor B₀ and A₀: whoever reads it makes them again from W.
Shapes: r rank, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def principal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Split W's r greatest singular values into A₀ and B₀: PiSSA (Meng et al., 2024)."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = (values[:rank] / scale).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def orthonormal(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Take r columns of Q as B₀ and rows of R as A₀, of W = Q·R: OLoRA (Büyükakyüz, 2024)."""
    q, r = torch.linalg.qr(weight)
    return r[:rank], q[:, :rank]


TAKEN_OUT: Mapping[str, Callable[[Tensor, int, float], tuple[Tensor, Tensor]]] = {
    "pissa": principal,
    "olora": orthonormal,
}
"""A₀ (r, I) and B₀ (O, r) of a weight (O, I) in float32, a rank and a scale, by peft's word."""

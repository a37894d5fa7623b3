"""Refuses weights that hold a NaN or an infinity."""

import torch
from torch import Tensor


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether all values are finite, also once converted to `dtype`; copy nothing."""
    if not values.numel():
        return True
    extremes = torch.stack(torch.aminmax(values.detach()))  # a NaN makes both of them NaN
    return bool(extremes.to(dtype or values.dtype).isfinite().all())

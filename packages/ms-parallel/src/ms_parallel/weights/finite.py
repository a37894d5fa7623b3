"""Refuses weights that hold a NaN or an infinity."""

import torch
from torch import Tensor


def is_finite(values: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether all values are numbers, also once converted to `dtype`; copies nothing."""
    if not values.numel():
        return True
    extremes = torch.stack(torch.aminmax(values.detach()))  # a NaN makes both of them NaN
    return bool(extremes.to(dtype or values.dtype).isfinite().all())

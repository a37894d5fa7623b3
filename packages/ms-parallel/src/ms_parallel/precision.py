"""Mixed precision: float32 masters and gradients, bfloat16 computation."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["compute_dtype", "precision_policy"]


def compute_dtype(mixed_precision: bool) -> torch.dtype:
    """What the blocks compute in, and what travels between stages."""
    return torch.bfloat16 if mixed_precision else torch.float32


def precision_policy(mixed_precision: bool) -> MixedPrecisionPolicy:
    """FSDP2's policy: cast weights when they are gathered, sum gradients in float32."""
    if not mixed_precision:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

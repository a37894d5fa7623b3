"""Mixed precision: float32 masters and gradients, bfloat16 computation."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["precision_policy"]


def precision_policy(mixed_precision: bool) -> MixedPrecisionPolicy:
    """FSDP2's policy: cast weights when they are gathered, sum gradients in float32."""
    if not mixed_precision:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

"""AdamW through aclnnApplyAdamWV2, reached by torch's `_fused_adamw_`.

`npu_apply_adam_w` is not it: on Atlas A2 that one takes an older path, which is not an aclnn call,
and wants the powers of both betas beforehand. Its successor takes the step itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ms_kernels.ascend.limits import NPU, empty
from ms_kernels.contract import Call, describe
from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.registry import Implementation

__all__ = ["IMPLEMENTATIONS", "adamw_step"]


def _step(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: int,
    learning_rate: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
) -> None:
    taken = torch.full((), float(step), dtype=torch.float32, device=weights.device)
    torch._fused_adamw_(
        [weights],
        [gradient],
        [mean],
        [square],
        [],
        [taken],
        lr=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


adamw_step = opaque(CONTRACTS["adamw_step"], "ascend", forward=_step)
"""Write new weights and moments. An operator of its own: torch.compile cannot trace torch's."""


def refuses(call: Call) -> str | None:
    """Decline weights or gradients of another dtype than the moments' float32."""
    for name, fact in zip(("weights", "gradient", "mean", "square"), call.facts, strict=True):
        assert fact is not None
        if fact.dtype != torch.float32:
            return f"takes all four in float32, and {name} is {describe(fact.dtype)}"
    return empty(call)


IMPLEMENTATIONS = (
    Implementation(
        operator="adamw_step",
        backend="ascend",
        run=adamw_step,
        devices=NPU,
        dtypes=(torch.float32,),
        refuses=refuses,
        merit="aclnnApplyAdamWV2: weights and moments in one kernel",
    ),
)

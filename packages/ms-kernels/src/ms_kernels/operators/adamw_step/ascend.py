"""AdamW through aclnnApplyAdamWV2, called by torch's `_fused_adamw_`.

`npu_apply_adam_w` is not used: on Atlas A2 it takes an older path that is not an aclnn call and
needs the powers of both betas as inputs. aclnnApplyAdamWV2 takes the step number.
"""

from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call, describe
from ms_kernels.core.torch_operator import opaque
from ms_kernels.operators.adamw_step.contract import CONTRACT


def _step(weights: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *options: Any) -> None:
    step, learning_rate, betas, eps, weight_decay = options
    step_tensor = torch.full((), float(step), dtype=torch.float32, device=weights.device)
    torch._fused_adamw_(
        [weights],
        [gradient],
        [mean],
        [square],
        [],
        [step_tensor],
        lr=learning_rate,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


# Registered as a separate operator, because torch.compile cannot trace torch's.
adamw_step = opaque(CONTRACT, "ascend", forward=_step)


def _refuses(call: Call) -> str | None:
    """Decline tensors that are not float32."""
    for name, meta in zip(("weights", "gradient", "mean", "square"), call.present, strict=True):
        if meta.dtype != torch.float32:
            return f"needs all tensors in float32, and {name} is {describe(meta.dtype)}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    adamw_step,
    "aclnnApplyAdamWV2: weights and moments in one kernel",
    refuses=_refuses,
    dtypes=(torch.float32,),
)

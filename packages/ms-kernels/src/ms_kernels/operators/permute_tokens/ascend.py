"""Tokens sorted by expert through npu_moe_token_permute; its int32 places are converted to int64.

An out-of-range expert is mapped to an extra expert after the last one: its row comes last and is in
no count, as in our Triton kernel. It does not synchronize with the device.
"""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.permute_tokens.contract import CONTRACT

MAX_CHOICES = 512
MAX_INDICES = 2**24 - 1
"""Indices are sorted as float32, which represents integers exactly only up to here."""


def permute_tokens(x: Tensor, experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows sorted by expert, rows per expert, and the row index of each choice."""
    experts = experts.masked_fill(experts.clamp(0, count - 1) != experts, count)
    rows, places = torch.ops.npu.npu_moe_token_permute(x, experts)
    flat = experts.reshape(-1).to(torch.int64)
    counts = flat.new_zeros(count + 1).scatter_add(0, flat, torch.ones_like(flat))[:count]
    return rows, counts, places.view(experts.shape).to(torch.int64)


def refuse_many_choices(call: Call) -> str | None:
    """Decline calls with more choices than CANN can sort."""
    experts = call.present[1]
    tokens, choices = experts.shape
    if choices > MAX_CHOICES:
        return f"supports at most {MAX_CHOICES} choices per token, not {choices}"
    if tokens * choices > MAX_INDICES:
        return f"sorts at most {MAX_INDICES} choices, not {tokens * choices}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    permute_tokens,
    "npu_moe_token_permute: sorts and copies in one kernel",
    refuses=refuse_many_choices,
)

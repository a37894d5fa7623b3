"""Rotary embedding through npu_rotary_mul.

Differences from the contract, bridged here:

1. The fused operator needs tables as wide as the rotated features, (C, S, 1, R); the contract's
   are half as wide. They are widened once per pair of tables and cached, not once per layer.
2. It casts the tables to the dtype of the features. A cosine rounded to bfloat16 is off by 2⁻⁹,
   beyond the contract's tolerance where two products cancel, so half-precision features are
   rotated in float32 and rounded once.
3. It rotates the full head dimension; pass-through features are split off and concatenated again.
4. Interleaved, it needs tables shared by all rows, and fewer than 1,000 rows times heads. Other
   calls are flattened to a single row in which every position has its own angles.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ms_kernels.backends.ascend import empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.rotary.contract import CONTRACT

MAX_WIDTH = 894
"""Widest even head below CANN's limit of 896."""
MAX_ROWS = 999
"""Maximum batch size and maximum number of heads; interleaved, the maximum of their product."""

_widened: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache by table: (table version, interleaved, widened table)."""


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of features of q and k."""
    tables = _widen(cos, interleaved), _widen(sin, interleaved)
    return _rotate(q, *tables, interleaved), _rotate(k, *tables, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    rotated = x if width == x.shape[-1] else x[..., :width]
    if interleaved and (cos.shape[0] > 1 or x.shape[0] * x.shape[2] > MAX_ROWS):
        rotated, cos, sin = (_as_one_row(tensor, x.shape[0]) for tensor in (rotated, cos, sin))
    mode = "interleave" if interleaved else "half"
    result: Tensor = torch.ops.npu.npu_rotary_mul(rotated.to(cos.dtype), cos, sin, mode)
    result = result.to(x.dtype).view(*x.shape[:-1], width)
    return result if width == x.shape[-1] else torch.cat((result, x[..., width:]), -1)


def _as_one_row(x: Tensor, rows: int) -> Tensor:
    """Flatten the batch into one row: (B or 1, S, N, R) to (1, B·S, N, R)."""
    return x.expand(rows, -1, -1, -1).flatten(0, 1).unsqueeze(0)


def _widen(table: Tensor, interleaved: bool) -> Tensor:
    """Widen (C, S, R/2) to (C, S, 1, R); cached until the table is modified or freed."""
    if torch.compiler.is_compiling() or type(table) is not Tensor:
        return _double(table, interleaved)
    cached = _widened[table] if table in _widened else (None, None, table)  # noqa: SIM401 - untyped
    if cached[:2] != (table._version, interleaved):
        cached = (table._version, interleaved, _double(table, interleaved))
        _widened[table] = cached
    wide: Tensor = cached[2]
    return wide


def _double(table: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((table, table), -1).flatten(-2).unsqueeze(2)
    return torch.cat((table, table), -1).unsqueeze(2)


def _refuses(call: Call) -> str | None:
    """Decline sizes beyond the fused operator's limits."""
    q, k, cos, sin = call.present
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        return "needs tables in float32"
    if 2 * cos.shape[-1] > MAX_WIDTH:
        return f"rotates at most {MAX_WIDTH} features, not {2 * cos.shape[-1]}"
    rows = 1 if call.options[0] else q.shape[0]
    if max(rows, q.shape[2], k.shape[2]) > MAX_ROWS:
        return f"supports at most {MAX_ROWS} rows and heads"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    rotary,
    "npu_rotary_mul: one kernel each for q and k; saves only the tables",
    refuses=_refuses,
)

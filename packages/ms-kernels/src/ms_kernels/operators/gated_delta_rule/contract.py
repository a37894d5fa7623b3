"""Gated delta rule (Yang et al., 2024, arXiv 2412.06464), position by position.

The state of a head is a matrix S (D, Dv) that maps keys to values. At each position it decays by
``e^g``, and its output for the key moves towards the value by the fraction β::

    S ← e^g · S;    S ← S + k (β · (v - Sᵀ k))ᵀ;    result = scale · Sᵀ q

1. The published layers normalize q and k first; here that is an option, with the same eps of 1e-6.
2. At the start of a document the state is reset to 0, even if it contained inf or NaN.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Work
from ms_kernels.contracts.call import ACCUMULATED, FLOATING, Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.documents import documents_argument, starts_of
from ms_kernels.contracts.options import flag, scale_option

NORM_EPS = 1e-6
"""Added to the squared norm of a key or query before the square root."""


class RuleOptions(NamedTuple):
    """Options of the operator, in the order of the contract."""

    scale: float | None
    normalize: bool
    final_state: bool

    def factor(self, width: int) -> float:
        """Return the factor of the results for head dimension `width`."""
        return width**-0.5 if self.scale is None else self.scale


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
    *options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the output of each position; with `final_state` also the state after the last one."""
    settings = RuleOptions(*options)
    batch, positions, groups, width = q.shape
    heads, out_width = v.shape[2:]
    wide = accumulator(q.dtype)
    queries, keys = (
        l2_normalize(vectors.to(wide), settings.normalize).repeat_interleave(heads // groups, 2)
        for vectors in (q, k)
    )
    values, decay, betas = v.to(wide), g.to(wide).exp(), beta.to(wide)
    memory = q.new_zeros((batch, heads, width, out_width), dtype=wide)  # S, (B, Hv, D, Dv)
    memory = memory if state is None else memory + state.to(wide)
    starts = None if documents is None else starts_of(documents)
    outputs = []
    for position in range(positions):
        key = keys[:, position].unsqueeze(-1)  # (B, Hv, D, 1)
        if starts is not None:
            memory = memory.masked_fill(starts[:, position, None, None, None], 0)
        memory = memory * decay[:, position, :, None, None]  # S ← e^g · S
        change = values[:, position] - (memory * key).sum(-2)  # (B, Hv, Dv)
        # S ← S + k (β · (v - Sᵀk))ᵀ
        memory = memory + key * (change * betas[:, position].unsqueeze(-1)).unsqueeze(-2)
        outputs.append((memory * queries[:, position].unsqueeze(-1)).sum(-2))  # Sᵀq, (B, Hv, Dv)
    result = (torch.stack(outputs, 1) * settings.factor(width)).to(q.dtype)
    return (result, memory) if settings.final_state else result


def l2_normalize(x: Tensor, normalize: bool) -> Tensor:
    """Normalize x (..., D) to unit length if `normalize`."""
    if not normalize:
        return x
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["Hv"] % dims["Hk"]:
        yield "v", f"of a number of heads (third size) that q's {dims['Hk']} divides"


def _forward(dims: Dims, itemsize: int) -> Work:
    """Read q, k and v and write the result once; three passes over the state per position."""
    rows = dims["B"] * dims["S"]
    elements = rows * 2 * (dims["Hk"] * dims["D"] + dims["Hv"] * dims["Dv"])
    flops = 6 * rows * dims["Hv"] * dims["D"] * dims["Dv"]
    return Work(elements * itemsize + 8 * rows * dims["Hv"], flops)


def _backward(dims: Dims, itemsize: int) -> Work:
    forward = _forward(dims, itemsize)
    return Work(2 * forward.size_bytes, 3 * forward.flops)


def _keys(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw random keys of unit length: with longer keys the state grows at every position."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(normal, dim=-1)


def _decays(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw random log decays, from almost no decay to almost complete decay."""
    return -3 * torch.rand(shape, generator=generator, dtype=torch.float64).pow(4)


def _random_betas(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw random values of beta from 0 to 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


CONTRACT = Contract(
    name="gated_delta_rule",
    summary="linear attention with a decaying state matrix per head, reset at document starts",
    arguments=(
        Argument(name="q", dims="B S Hk D"),
        Argument(name="k", dims="B S Hk D", like="q", draw=_keys),
        Argument(name="v", dims="B S Hv Dv", like="q"),
        Argument(name="g", dims="B S Hv", dtypes=FLOATING, draw=_decays),
        Argument(name="beta", dims="B S Hv", dtypes=FLOATING, draw=_random_betas),
        documents_argument("B S"),
        Argument(name="state", dims="B Hv D Dv", dtypes=ACCUMULATED, optional=True),
    ),
    options=(scale_option, flag("normalize"), flag("final_state")),
    returns="(B S Hv Dv), dtype of q; with final_state=True a second one, (B Hv D Dv) float32",
    results={"result": "B S Hv Dv", "final": "B Hv D Dv"},
    splits=("B", "Hk Hv"),
    positive="S Hk Hv D Dv",
    rules=_rules,
    forward=_forward,
    backward=_backward,
    example={"B": 2, "S": 48, "Hk": 2, "Hv": 4, "D": 16, "Dv": 8},
    reference=gated_delta_rule,
    ladders=(Ladder({"B": 1, "Hk": 2, "Hv": 4, "D": 64, "Dv": 64}, ("S",)),),
)

"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464), position by position.

A head keeps a matrix S (D, Dv) that maps keys to values. At each position it fades by ``e^g``,
and what it answers to the key is moved towards the value by the share β::

    S ← e^g · S;    S ← S + k (β · (v - Sᵀ k))ᵀ;    result = scale · Sᵀ q

1. The published layers normalize q and k before it; here that is an option, with their 1e-6.
2. Where a document begins the matrix is set to 0, whatever it held.
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
"""What is added to the squared length of a key or query before its root is taken."""


class RuleOptions(NamedTuple):
    """The options, in order."""

    scale: float | None
    normalize: bool
    final_state: bool

    def factor(self, width: int) -> float:
        """Return what results are multiplied by, for heads of `width` features."""
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
    """Return what each position's query reads, and perhaps the state after the last one."""
    settings = RuleOptions(*options)
    batch, positions, groups, width = q.shape
    heads, out_width = v.shape[2:]
    wide = accumulator(q.dtype)
    queries, keys = (
        normalized(each.to(wide), settings.normalize).repeat_interleave(heads // groups, 2)
        for each in (q, k)
    )
    values, fade, shares = v.to(wide), g.to(wide).exp(), beta.to(wide)
    held = q.new_zeros((batch, heads, width, out_width), dtype=wide)
    held = held if state is None else held + state.to(wide)
    starts = None if documents is None else starts_of(documents)
    read = []
    for place in range(positions):
        key = keys[:, place].unsqueeze(-1)  # (B, Hv, D, 1)
        if starts is not None:
            held = held.masked_fill(starts[:, place, None, None, None], 0)
        held = held * fade[:, place, :, None, None]
        change = values[:, place] - (held * key).sum(-2)  # (B, Hv, Dv)
        held = held + key * (change * shares[:, place].unsqueeze(-1)).unsqueeze(-2)
        read.append((held * queries[:, place].unsqueeze(-1)).sum(-2))
    result = (torch.stack(read, 1) * settings.factor(width)).to(q.dtype)
    return (result, held) if settings.final_state else result


def normalized(x: Tensor, normalize: bool) -> Tensor:
    """Return x (..., D) at length 1 where it is asked for."""
    if not normalize:
        return x
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["Hv"] % dims["Hk"]:
        yield "v", f"of a number of heads (third size) that q's {dims['Hk']} divides"


def _forward(dims: Dims, itemsize: int) -> Work:
    """Read q, k and v and write the result once; three passes over the matrix a position."""
    rows = dims["B"] * dims["S"]
    elements = rows * 2 * (dims["Hk"] * dims["D"] + dims["Hv"] * dims["Dv"])
    flops = 6 * rows * dims["Hv"] * dims["D"] * dims["Dv"]
    return Work(elements * itemsize + 8 * rows * dims["Hv"], flops)


def _backward(dims: Dims, itemsize: int) -> Work:
    forward = _forward(dims, itemsize)
    return Work(2 * forward.size_bytes, 3 * forward.flops)


def _keys(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw keys of length 1: with longer ones the state grows at every position."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(drawn, dim=-1)


def _decays(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw logarithms of decays, from almost none to almost all."""
    return -3 * torch.rand(shape, generator=generator, dtype=torch.float64).pow(4)


def _shares(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw shares from 0 to 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float64)


CONTRACT = Contract(
    name="gated_delta_rule",
    summary="a fading matrix a head that learns values by their keys; documents apart",
    arguments=(
        Argument(name="q", dims="B S Hk D"),
        Argument(name="k", dims="B S Hk D", like="q", draw=_keys),
        Argument(name="v", dims="B S Hv Dv", like="q"),
        Argument(name="g", dims="B S Hv", dtypes=FLOATING, draw=_decays),
        Argument(name="beta", dims="B S Hv", dtypes=FLOATING, draw=_shares),
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

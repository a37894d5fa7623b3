"""Scaled dot-product attention with grouped queries, documents, a window and a cache."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, Work
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.options import flag, scale_option, window_option
from ms_kernels.contracts.tolerance import ATTENTION

__all__ = ["CONTRACT", "MaskOptions", "attention", "visible"]


class MaskOptions(NamedTuple):
    """The options of attention, in order."""

    causal: bool
    window: int | None
    scale: float | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v`` a head, scores held whole in float32."""
    batch, queries, heads, width = q.shape
    groups = k.shape[2]
    wide = accumulator(q.dtype)
    # Query head h reads key head h // (Hq / Hk): (B, Hk, Hq/Hk, Sq, D) against (B, Hk, 1, Sk, D).
    # A split of one dim is a view under any strides.
    grouped = q.to(wide).view(batch, queries, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    keys = k.to(wide).permute(0, 2, 1, 3).unsqueeze(2)
    values = v.to(wide).permute(0, 2, 1, 3).unsqueeze(2)
    scores = (grouped * (width**-0.5 if scale is None else scale)) @ keys.transpose(-1, -2)
    mask = visible(queries, k.shape[1], q.device, documents, causal, window)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    result = scores.softmax(-1) @ values
    return result.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, width).to(q.dtype)


def visible(
    queries: int,
    keys: int,
    device: torch.device,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
) -> Tensor | None:
    """Return which key each query may see, bool (B or 1, Sq, Sk), or None if it may see all.

    Queries are the last `queries` of the `keys` positions, so each sees at least itself.
    """
    place = torch.arange(keys, device=device)
    distance = place[keys - queries :, None] - place  # (Sq, Sk), positive for the past
    mask = None
    if causal and queries > 1:
        mask = distance >= 0
    if window is not None:
        near = distance.abs() < window
        mask = near if mask is None else mask & near
    mask = mask if mask is None else mask[None]
    if documents is not None:
        same = documents[:, keys - queries :, None] == documents[:, None, :]
        mask = same if mask is None else mask & same
    return mask


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["Hq"] % dims["Hk"]:
        yield "k", f"of a number of heads (third size) that divides q's {dims['Hq']}"
    if dims["Sq"] > dims["Sk"]:
        yield "q", f"of at most {dims['Sk']} positions (second size): they are the last of k's"


def _forward(dims: Dims, itemsize: int) -> Work:
    """Half of the score matrix is counted, as for a causal mask."""
    heads = 2 * dims["Sq"] * dims["Hq"] + 2 * dims["Sk"] * dims["Hk"]
    pairs = dims["Sq"] * (2 * dims["Sk"] - dims["Sq"] + 1) // 2
    flops = 4 * dims["B"] * dims["Hq"] * pairs * dims["D"]
    return Work(dims["B"] * heads * dims["D"] * itemsize, flops)


def _backward(dims: Dims, itemsize: int) -> Work:
    forward = _forward(dims, itemsize)
    return Work(2 * forward.size_bytes, 5 * forward.flops // 2)


def _documents(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw documents of about 10 positions."""
    starts = torch.rand(shape, generator=generator) < 0.1
    return starts.to(torch.int32).cumsum(-1).to(torch.int32)


CONTRACT = Contract(
    name="attention",
    summary="softmax(q kᵀ · scale + mask) v, grouped queries, documents, window, cached keys",
    arguments=(
        Argument(name="q", dims="B Sq Hq D"),
        Argument(name="k", dims="B Sk Hk D", like="q"),
        Argument(name="v", dims="B Sk Hk D", like="q"),
        Argument(
            name="documents",
            dims="B Sk",
            dtypes=(torch.int32, torch.int64),
            optional=True,
            differentiable=False,
            draw=_documents,
        ),
    ),
    options=(
        flag("causal", default=True),
        window_option,
        scale_option,
    ),
    returns="(B Sq Hq D), dtype of q",
    results={"result": "B Sq Hq D"},
    splits=("B", "Hq Hk"),
    positive="Hq Hk D",
    rules=_rules,
    forward=_forward,
    backward=_backward,
    tolerance=ATTENTION,
    example={"B": 2, "Sq": 48, "Sk": 48, "Hq": 4, "Hk": 2, "D": 16},
    reference=attention,
    ladders=(Ladder({"B": 1, "Hq": 4, "Hk": 2, "D": 64}, ("Sq", "Sk")),),
    model=Model(free=("S",), sizes={"Hq": 32, "Hk": 8, "D": 128}),
)

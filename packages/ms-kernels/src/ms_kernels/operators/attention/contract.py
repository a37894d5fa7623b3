"""Contract and reference of scaled dot-product attention."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, Work
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract, Variant
from ms_kernels.contracts.options import flag, scale_option, window_option
from ms_kernels.contracts.tolerance import ATTENTION


class MaskOptions(NamedTuple):
    """The options of attention, in order."""

    causal: bool
    window: int | None
    scale: float | None

    def factor(self, width: int) -> float:
        """Return the factor applied to the scores, for heads of `width` features."""
        return width**-0.5 if self.scale is None else float(self.scale)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v`` per head, with all scores in float32.

    A head's sink is an extra score for each of its queries, with a value of zero.
    """
    batch, queries, heads, width = q.shape
    groups = k.shape[2]
    wide = accumulator(q.dtype)
    # Query head h attends to key head h // (Hq / Hk): (B, Hk, Hq/Hk, Sq, D) x (B, Hk, 1, Sk, D).
    # Splitting a dim gives a view for any strides.
    grouped = q.to(wide).view(batch, queries, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    keys = k.to(wide).permute(0, 2, 1, 3).unsqueeze(2)
    values = v.to(wide).permute(0, 2, 1, 3).unsqueeze(2)
    # (B, Hk, Hq/Hk, Sq, Sk)
    scores = (grouped * (width**-0.5 if scale is None else scale)) @ keys.transpose(-1, -2)
    mask = visible(queries, k.shape[1], q.device, documents, causal, window)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    if sinks is None:
        probs = scores.softmax(-1)
    else:
        sink = sinks.to(wide).view(groups, heads // groups, 1, 1).expand(*scores.shape[:-1], 1)
        # the sink has no value, so drop it
        probs = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    result = probs @ values
    return result.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, v.shape[3]).to(q.dtype)


def visible(
    queries: int,
    keys: int,
    device: torch.device,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
) -> Tensor | None:
    """Return the mask of visible keys, bool (B or 1, Sq, Sk), or None if all are visible.

    Queries are the last `queries` of the `keys` positions, so each sees at least itself.
    """
    position = torch.arange(keys, device=device)
    distance = position[keys - queries :, None] - position  # (Sq, Sk), positive for the past
    mask = None
    if causal and queries > 1:
        mask = distance >= 0
    if window is not None:
        near = distance.abs() < window  # (Sq, Sk)
        mask = near if mask is None else mask & near
    mask = mask if mask is None else mask[None]
    if documents is not None:
        same = documents[:, keys - queries :, None] == documents[:, None, :]  # (B, Sq, Sk)
        mask = same if mask is None else mask & same
    return mask


def as_wide(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero-pad heads or values to a common width, which does not change the result."""
    width, values = q.shape[-1], v.shape[-1]
    if width < values:
        return F.pad(q, (0, values - width)), F.pad(k, (0, values - width)), v
    return q, k, F.pad(v, (0, width - values)) if values < width else v


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["Hq"] % dims["Hk"]:
        yield "k", f"of a number of heads (third size) that divides q's {dims['Hq']}"
    if dims["Sq"] > dims["Sk"]:
        yield "q", f"of at most {dims['Sk']} positions (second size), the number of k's positions"


def _forward(dims: Dims, itemsize: int) -> Work:
    """Count the work for a causal mask, i.e. half of the score matrix."""
    heads, widths = dims["Sq"] * dims["Hq"] + dims["Sk"] * dims["Hk"], dims["D"] + dims["Dv"]
    pairs = dims["Sq"] * (2 * dims["Sk"] - dims["Sq"] + 1) // 2  # visible pairs of a causal mask
    flops = 2 * dims["B"] * dims["Hq"] * pairs * widths
    return Work(dims["B"] * heads * widths * itemsize, flops)


def _backward(dims: Dims, itemsize: int) -> Work:
    forward = _forward(dims, itemsize)
    # backward has 5 products, forward 2
    return Work(2 * forward.size_bytes, 5 * forward.flops // 2)


def _documents(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Generate documents of about 10 positions each."""
    starts = torch.rand(shape, generator=generator) < 0.1
    return starts.to(torch.int32).cumsum(-1).to(torch.int32)


CONTRACT = Contract(
    name="attention",
    summary="softmax(q kᵀ · scale + mask) v, grouped queries, documents, window, cache, sinks",
    arguments=(
        Argument(name="q", dims="B Sq Hq D"),
        Argument(name="k", dims="B Sk Hk D", like="q"),
        Argument(name="v", dims="B Sk Hk Dv", like="q"),
        Argument(
            name="documents",
            dims="B Sk",
            dtypes=(torch.int32, torch.int64),
            optional=True,
            differentiable=False,
            draw=_documents,
        ),
        Argument(name="sinks", dims="Hq", optional=True),
    ),
    options=(
        flag("causal", default=True),
        window_option,
        scale_option,
    ),
    returns="(B Sq Hq Dv), dtype of q",
    results={"result": "B Sq Hq Dv"},
    splits=("B", "Hq Hk"),
    positive="Hq Hk D Dv",
    rules=_rules,
    forward=_forward,
    backward=_backward,
    tolerance=ATTENTION,
    example={"B": 2, "Sq": 48, "Sk": 48, "Hq": 4, "Hk": 2, "D": 16, "Dv": 16},
    follows={"Dv": "D"},
    reference=attention,
    variants=(Variant({}, {"D": 24, "Dv": 8}), Variant({"window": 7}, {"D": 8, "Dv": 24})),
    ladders=(Ladder({"B": 1, "Hq": 4, "Hk": 2, "D": 64, "Dv": 64}, ("Sq", "Sk")),),
    model=Model(free=("S",), sizes={"Hq": 32, "Hk": 8, "D": 128, "Dv": 128}),
)

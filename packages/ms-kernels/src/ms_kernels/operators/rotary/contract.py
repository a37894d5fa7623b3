"""Rotary position embedding (Su et al., 2021), full or partial, in halves or interleaved."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Model, Work
from ms_kernels.contracts.call import ACCUMULATED, Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.options import flag


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of the first 2·(R/2) features of each head by the given angles."""
    # (C, S, R/2) -> (C, S, 1, R/2): all heads of a position share the angles.
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    rotated, passthrough = x[..., :width].to(accumulator(x.dtype)), x[..., width:]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, passthrough), dim=-1) if passthrough.shape[-1] else rotated


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["C"] not in (1, dims["B"]):
        yield "cos", f"of a first size of 1 or {dims['B']}, q's batch"
    if 2 * dims["R/2"] > dims["D"]:
        yield "cos", f"of a last size of at most {dims['D'] // 2}, half of q's head"


def _work(dims: Dims, itemsize: int) -> Work:
    heads = dims["B"] * dims["S"] * (dims["Hq"] + dims["Hk"])
    # Elements of cos and sin, which are float32.
    angles = 2 * dims["C"] * dims["S"] * dims["R/2"]
    return Work(2 * heads * dims["D"] * itemsize + 4 * angles, 6 * heads * dims["R/2"])


def _cosines(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return _angles(shape).cos()


def _sines(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return _angles(shape).sin()


def _angles(shape: tuple[int, ...]) -> Tensor:
    batch, length, half = shape
    frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / max(half, 1))
    return torch.outer(torch.arange(length, dtype=torch.float64), frequencies).expand(
        batch, length, half
    )


CONTRACT = Contract(
    name="rotary",
    summary="rotates pairs of features of q and k by the angles of their positions",
    arguments=(
        Argument(name="q", dims="B S Hq D"),
        Argument(name="k", dims="B S Hk D", like="q"),
        Argument(
            name="cos", dims="C S R/2", dtypes=ACCUMULATED, differentiable=False, draw=_cosines
        ),
        Argument(name="sin", dims="C S R/2", dtypes=ACCUMULATED, differentiable=False, draw=_sines),
    ),
    options=(flag("interleaved"),),
    returns="two tensors, shapes and dtypes of q and k",
    results={"turned_q": "B S Hq D", "turned_k": "B S Hk D"},
    splits=("B C", "S", "Hq Hk"),
    positive="Hq Hk D R/2",
    rules=_rules,
    forward=_work,
    backward=_work,
    example={"B": 2, "C": 1, "S": 64, "Hq": 8, "Hk": 2, "D": 32, "R/2": 16},
    reference=rotary,
    ladders=(Ladder({"B": 1, "C": 1, "Hq": 8, "Hk": 2, "D": 64, "R/2": 32}, ("S",)),),
    model=Model(free=("S",), sizes={"Hq": 32, "Hk": 8, "D": 128, "R/2": 64}),
)
